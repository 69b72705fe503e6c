//! Whether the arguments of a call are complete, told from their JSON as it comes.

/// How far an object has come: what is open in it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Arguments {
    depth: usize,
    has_begun: bool,
    is_in_string: bool,
    is_escaped: bool,
}

impl Arguments {
    pub(super) fn of(json: &str) -> Self {
        let mut arguments = Self::default();
        arguments.push(json);
        arguments
    }

    pub(super) fn push(&mut self, json: &str) {
        for byte in json.bytes() {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' if self.is_in_string => self.is_escaped = true,
                b'"' => self.is_in_string = !self.is_in_string,
                _ if self.is_in_string => {}
                b'{' | b'[' => {
                    self.depth += 1;
                    self.has_begun = true;
                }
                b'}' | b']' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
    }

    /// Whether they have begun and ended. Nothing at all is no arguments yet.
    pub(super) const fn are_complete(self) -> bool {
        self.has_begun && self.depth == 0 && !self.is_in_string
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// An object is complete at its last byte, and not before.
        #[test]
        fn an_object_is_complete_at_its_end(
            fields in prop::collection::hash_map(".{0,6}", "[\\]\\[{}\"\\\\a]{0,8}", 0..4),
        ) {
            let json = serde_json::json!({"a": fields, "b": [1, {"c": "}"}]}).to_string();
            let mut arguments = Arguments::default();
            for (at, char) in json.char_indices() {
                prop_assert!(!arguments.are_complete(), "{} at {at}", json);
                arguments.push(char.encode_utf8(&mut [0; 4]));
            }
            prop_assert!(arguments.are_complete() && Arguments::of(&json) == arguments);
        }
    }

    #[test]
    fn nothing_and_what_is_no_object_is_not_complete() {
        for json in ["", " ", "null", "\"{}\"", "}", "{\"a\": \"}"] {
            assert!(!Arguments::of(json).are_complete(), "{json}");
        }
    }
}
