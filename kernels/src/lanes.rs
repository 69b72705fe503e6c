//! Sixteen floats side by side: one AVX-512 register, two AVX2, four NEON. Not an abstraction over
//! intrinsics: plain loops that the compiler turns into vector instructions.

/// How many floats a [`Lanes`] has, on every processor.
pub(crate) const LANES: usize = 16;

/// Sixteen floats, aligned so that no load crosses a cache line.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Lanes(pub(crate) [f32; LANES]);

impl Lanes {
    pub(crate) const ZERO: Self = Self([0.0; LANES]);

    /// The first `LANES` values of `x`.
    #[inline(always)]
    pub(crate) fn load(x: &[f32]) -> Self {
        let mut out = Self::ZERO;
        out.0.copy_from_slice(&x[..LANES]);
        out
    }

    /// `x`, shorter than `LANES`, with zeros behind it.
    #[inline(always)]
    pub(crate) fn load_padded(x: &[f32]) -> Self {
        let mut out = Self::ZERO;
        out.0[..x.len()].copy_from_slice(x);
        out
    }

    /// `self * scale + addend`, each lane rounded once.
    #[inline(always)]
    pub(crate) fn scale_add(self, scale: f32, addend: Self) -> Self {
        let mut out = addend;
        for lane in 0..LANES {
            out.0[lane] = self.0[lane].mul_add(scale, addend.0[lane]);
        }
        out
    }

    /// `self * other + addend`, each lane rounded once.
    #[inline(always)]
    pub(crate) fn mul_add(self, other: Self, addend: Self) -> Self {
        let mut out = addend;
        for lane in 0..LANES {
            out.0[lane] = self.0[lane].mul_add(other.0[lane], addend.0[lane]);
        }
        out
    }

    /// The sum of each two lanes, rounded once.
    #[inline(always)]
    pub(crate) fn add(self, other: Self) -> Self {
        let mut out = self;
        for lane in 0..LANES {
            out.0[lane] += other.0[lane];
        }
        out
    }

    /// The larger value of each two lanes; that of `self` where either is NaN.
    #[inline(always)]
    pub(crate) fn max(self, other: Self) -> Self {
        let mut out = self;
        for lane in 0..LANES {
            out.0[lane] = if other.0[lane] > self.0[lane] { other.0[lane] } else { self.0[lane] };
        }
        out
    }

    /// Sum of the lanes, always by the same tree: lane `i` with lane `i + 8`, then `+ 4`, `+ 2`, `+ 1`.
    #[inline(always)]
    pub(crate) fn sum(self) -> f32 {
        let mut tree = self.0;
        for half in [8, 4, 2, 1] {
            for lane in 0..half {
                tree[lane] += tree[lane + half];
            }
        }
        tree[0]
    }

    /// The largest lane, compared by the tree of [`Lanes::sum`].
    #[inline(always)]
    pub(crate) fn largest(self) -> f32 {
        let mut tree = self.0;
        for half in [8, 4, 2, 1] {
            for lane in 0..half {
                tree[lane] = if tree[lane + half] > tree[lane] { tree[lane + half] } else { tree[lane] };
            }
        }
        tree[0]
    }
}
