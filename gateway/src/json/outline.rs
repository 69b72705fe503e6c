//! Where the long strings and the containers of a JSON text end, found in one pass: a reader that then goes
//! through it level by level looks at no string twice, however deep it stands. Judges nothing: of a text that
//! is not JSON there may be no outline, and its reader looks for the ends itself.

use super::{DEPTH_MAX, Fields, cursor::string_end};

/// Strings and containers from this length on are part of it; to look through a shorter one takes no longer
/// than to find it here.
const LONG_BYTES: usize = 64;

/// There is at most one part for so many bytes, beside as many as may be open at once: half of the text's own
/// memory. What is all brackets has no outline.
const BYTES_PER_PART: usize = 32;

/// A container, or a long string. Offsets are of the text, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) start: u32,
    /// Behind its last byte.
    pub(super) end: u32,
    /// How many parts stand within it; they follow it.
    pub(super) within: u32,
    /// Whether it is a string that holds escapes.
    pub(super) escaped: bool,
}

/// A text, and where its parts end.
#[derive(Debug)]
pub struct Outline<'a> {
    text: &'a str,
    /// In the order in which they begin; none where the text has no outline.
    parts: Vec<Part>,
}

impl<'a> Outline<'a> {
    /// Looks through all of a text.
    pub fn of(text: &'a str) -> Self {
        Self { text, parts: parts(text.as_bytes()).unwrap_or_default() }
    }

    /// All of the text, as [`Outline::of`] was given it.
    pub fn text(&self) -> &'a str {
        self.text
    }

    /// As [`super::Value::document`], with the ends of its parts known beforehand.
    pub fn document(&self) -> Option<Fields<'_>> {
        Fields::of_document(self.text, &self.parts)
    }
}

/// `None` where a string or container has no end, one is nested too deeply, or they are too many.
fn parts(bytes: &[u8]) -> Option<Vec<Part>> {
    // Every offset is one.
    u32::try_from(bytes.len()).ok()?;
    let parts_max = DEPTH_MAX as usize + bytes.len() / BYTES_PER_PART;
    let mut parts: Vec<Part> = Vec::with_capacity(16);
    // The containers that have not ended.
    let mut open: Vec<usize> = Vec::with_capacity(8);
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let start = at as u32;
        at += 1;
        match byte {
            b'"' => {
                let (end, escaped) = string_end(bytes, at)?;
                if end - at >= LONG_BYTES {
                    parts.push(Part { start, end: end as u32, within: 0, escaped });
                }
                at = end;
            }
            b'{' | b'[' => {
                open.push(parts.len());
                parts.push(Part { start, end: 0, within: 0, escaped: false });
                if open.len() > DEPTH_MAX as usize || parts.len() > parts_max {
                    return None;
                }
            }
            b'}' | b']' => {
                let ended = open.pop()?;
                if at - parts[ended].start as usize >= LONG_BYTES {
                    let within = (parts.len() - ended - 1) as u32;
                    (parts[ended].end, parts[ended].within) = (at as u32, within);
                } else {
                    parts.truncate(ended);
                }
            }
            _ => {}
        }
    }
    open.is_empty().then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_takes_at_most_half_of_what_its_text_takes() {
        let deep = format!("{}{}", "[".repeat(100), "]".repeat(100));
        for filling in ["[],", "{\"a\":[{}]},", &format!("{deep},"), &format!("\"{}\",", "x".repeat(64))] {
            let text = format!("{{\"a\":[{}1]}}", filling.repeat(10_000));
            let outline = Outline::of(&text);
            let bytes = size_of_val(&outline.parts[..]);
            assert!(
                bytes <= text.len() / 2 + DEPTH_MAX as usize * size_of::<Part>(),
                "{bytes} of {}",
                text.len()
            );
            assert_eq!(outline.document().unwrap().flatten().count(), 1);
        }
        // Short ones leave no trace, long ones do.
        assert_eq!(Outline::of("{\"a\":[1,[2]]}").parts, []);
        let text = format!("{{\"a\":[[],\"{}\",{{}}]}}", "x".repeat(64));
        let within: Vec<u32> = Outline::of(&text).parts.iter().map(|part| part.within).collect();
        assert_eq!(within, [2, 1, 0], "the document, the list and the string");
    }
}
