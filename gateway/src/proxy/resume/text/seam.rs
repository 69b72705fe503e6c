//! Where another worker goes on with a text: what of its chunks the client has already, or is not to have.

use serde_json::Value as Json;

/// Where another worker goes on.
#[derive(Debug)]
pub(super) struct Seam {
    /// Tokens of the answer that the client has.
    pub(super) tokens: u64,
    /// Those that the worker was sent as text.
    pub(super) told: u64,
    /// White space that the client has and the worker was not sent, as templates cut it off: if it is said
    /// again, it is left out.
    pub(super) space: String,
    /// The client has the end; only what follows that is wanted.
    pub(super) over: bool,
    /// The budget was spent; the end is wanted, and no text.
    pub(super) silent: bool,
}

impl Seam {
    /// Takes out of a choice what the client has. Returns whether it says anything then.
    pub(super) fn pass(&mut self, choice: &mut Json, chat: bool) -> bool {
        let ends = choice.get("finish_reason").is_some_and(|reason| !reason.is_null());
        if let Some(reason) = choice.get_mut("finish_reason").filter(|_| ends && self.silent) {
            // Whatever the token too many is.
            *reason = "length".into();
        }
        let (place, field) = if chat { (choice.get_mut("delta"), "content") } else { (Some(choice), "text") };
        let Some(Json::Object(place)) = place else { return ends };
        if chat {
            place.remove("role");
        }
        if let Some(Json::String(text)) = place.get_mut(field) {
            if self.silent {
                text.clear();
            }
            self.skip_space(text);
        }
        let says = |(name, value): (&String, &Json)| match value {
            Json::String(text) => !text.is_empty() && (chat || name == "text"),
            Json::Array(parts) => !parts.is_empty() && chat,
            _ => false,
        };
        ends || place.iter().any(says)
    }

    /// Leaves out what of the white space comes again. The first text that is other ends that.
    fn skip_space(&mut self, text: &mut String) {
        let same = text.bytes().zip(self.space.bytes()).take_while(|(a, b)| a == b).count();
        // White space beyond ASCII may be equal in part.
        let same = (0..=same).rev().find(|at| text.is_char_boundary(*at) && self.space.is_char_boundary(*at));
        let same = same.unwrap_or(0);
        if text.len() > same {
            self.space.clear();
        } else {
            self.space.drain(..same);
        }
        text.drain(..same);
    }
}
