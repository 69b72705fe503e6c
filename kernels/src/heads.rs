//! Where heads lie inside the rows of a projection: what RMSNorm and the rotary embedding need to work on
//! them in place.

/// Heads inside rows: head `h` of row `r` begins at element `r * stride + first + h * pitch`. How many of its
/// elements an operation touches is that operation's business, at most `pitch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Elements from one row to the next.
    pub stride: usize,
    /// Where the first head begins in its row.
    pub first: usize,
    /// How many heads of each row there are, from the first on; 0 touches none.
    pub count: usize,
    /// Elements from one head to the next.
    pub pitch: usize,
}

impl Heads {
    /// Whether rows of `stride` hold `touched` elements at every head's beginning.
    pub(crate) fn fit(&self, touched: usize) -> bool {
        let Self { stride, first, count, pitch } = *self;
        touched <= pitch && (count == 0 || first + (count - 1) * pitch + touched <= stride)
    }

    /// The first `touched` elements of each head of `row`.
    #[inline(always)]
    pub(crate) fn of<'a>(&self, row: &'a mut [f32], touched: usize) -> impl Iterator<Item = &'a mut [f32]> {
        row[self.first..].chunks_mut(self.pitch).take(self.count).map(move |head| &mut head[..touched])
    }
}
