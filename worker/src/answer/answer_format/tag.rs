//! Text up to a tag, when both come in pieces. Blanks before the tag belong to it, so they are withheld with
//! what may be its beginning.

/// What is known of a text that may hold a tag.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Search {
    /// The tag is complete: the text before it, without the blanks at its end, and what follows.
    Found { before: String, after: String },
    /// Not yet: the text that is certain. The rest stays in the buffer.
    Open(String),
}

/// Looks for `tag` in `buffer` and takes out of it what is certain.
pub(super) fn search(buffer: &mut String, tag: &str) -> Search {
    if let Some(at) = buffer.find(tag) {
        let after = buffer[at + tag.len()..].to_owned();
        buffer.truncate(at);
        buffer.truncate(buffer.trim_end().len());
        return Search::Found { before: std::mem::take(buffer), after };
    }
    let begins = |at: &usize| tag.as_bytes().starts_with(&buffer.as_bytes()[*at..]);
    let first = buffer.len().saturating_sub(tag.len());
    let open = (first..buffer.len()).filter(|at| buffer.is_char_boundary(*at)).find(begins);
    let certain = buffer[..open.unwrap_or(buffer.len())].trim_end().len();
    let rest = buffer.split_off(certain);
    Search::Open(std::mem::replace(buffer, rest))
}
