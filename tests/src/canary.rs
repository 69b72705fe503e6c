//! Every prompt and key that a test sends is a canary: no line of any process's log may hold one. Registered where
//! requests are made ([`crate::openai`], [`crate::client`]), looked for where lines are captured ([`crate::process`]), so
//! that each test of the suite is a test of this too; at trace level with `KEYWAY_TEST_LOG=trace`.

use parking_lot::RwLock;

/// Canaries looked for at once; those that come later are not. A line costs a search for each.
const CANARIES_MAX: usize = 256;
/// Shorter ones could stand in a log for another reason.
const BYTES_MIN: usize = 14;

static CANARIES: RwLock<Vec<String>> = RwLock::new(Vec::new());

/// Looks for a text from now on, by its beginning (of a credential, without its scheme); short ones are let pass.
pub fn register(text: &str) {
    let text = text.strip_prefix("Bearer ").unwrap_or(text);
    let end = text.char_indices().map(|(at, _)| at).nth(40).unwrap_or(text.len());
    let canary = &text[..end];
    let plain = canary.bytes().all(|byte| (b' '..0x7f).contains(&byte) && !matches!(byte, b'"' | b'\\'));
    if canary.len() >= BYTES_MIN && plain && !CANARIES.read().iter().any(|known| known == canary) {
        let mut canaries = CANARIES.write();
        if canaries.len() < CANARIES_MAX {
            canaries.push(canary.to_owned());
        }
    }
}

/// A canary that a line holds.
pub fn found_in(line: &str) -> Option<String> {
    CANARIES.read().iter().find(|canary| line.contains(canary.as_str())).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sent_is_found_and_nothing_else() {
        register("this sentence is a canary, and long enough to be cut");
        register("hi");
        let found = found_in("DEBUG body={\"this sentence is a canary, and long enough\"}");
        assert_eq!(found.as_deref(), Some("this sentence is a canary, and long enou"));
        assert_eq!(found_in("hi, this sentence is none"), None);
    }
}
