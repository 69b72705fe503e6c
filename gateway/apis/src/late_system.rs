//! System messages in mid-conversation, as Claude Code sends them in each turn, for chat templates that take
//! system text in front alone. Such a message becomes what its client sends to models without the role: a
//! `<system-reminder>` of the user's, where it stands. In front it would change the prompt from its first
//! token on, and nothing of the conversation would be found cached.

use keyway_text::{ChatTemplate, Conversation, ConversationError, Field, Message};
use serde_json::json;

/// Where a model's chat template shows the model what system messages say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SystemPlace {
    /// Where they stand, and developers' messages too.
    Anywhere,
    /// Where they stand; it does not know developers, whose messages engines then move in front.
    NoDevelopers,
    /// In front of all others alone; also where the template is not known.
    InFront,
}

/// Whose a message of a chat is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Speaker {
    System,
    /// The user, or a tool with a text: a reminder may be added to what it says.
    Reminded,
    Other,
}

/// A message of a chat, in whatever type.
pub(crate) trait Turn: Sized {
    fn speaker(&self) -> Speaker;

    /// Whether its role is the developer's.
    fn is_developers(&self) -> bool {
        false
    }

    /// Makes its role the system's.
    fn make_system(&mut self) {}

    /// A user's message.
    fn of_user(text: String) -> Self;

    /// What it says.
    fn into_text(self) -> String;

    /// Makes two system messages in front one.
    fn join(&mut self, next: Self);

    /// Adds a text before or behind what it says.
    fn add(&mut self, text: &str, place: Beside);
}

/// On which side of what a message says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Beside {
    Before,
    Behind,
}

/// A text with another beside it, and an empty line between them.
pub(crate) fn beside(text: &str, added: &str, place: Beside) -> String {
    match (text, place) {
        ("", _) => added.to_owned(),
        (_, Beside::Before) => format!("{added}\n\n{text}"),
        (_, Beside::Behind) => format!("{text}\n\n{added}"),
    }
}

/// The messages with system text in front alone. A later one is added to the message of the user or of a tool
/// before it: many templates want users and assistants in turn, and take a user's message for a new question.
pub(crate) fn in_front<M: Turn>(messages: Vec<M>) -> Vec<M> {
    let mut told: Vec<M> = Vec::with_capacity(messages.len());
    // A reminder behind what the assistant said.
    let mut waiting: Option<String> = None;
    for mut message in messages {
        match message.speaker() {
            Speaker::System if told.is_empty() => told.push(message),
            Speaker::System => match told.last_mut() {
                Some(last) if last.speaker() == Speaker::System => last.join(message),
                Some(last) if waiting.is_none() && last.speaker() == Speaker::Reminded => {
                    last.add(&reminder(message.into_text()), Beside::Behind);
                }
                _ => {
                    let more = reminder(message.into_text());
                    waiting = Some(beside(waiting.as_deref().unwrap_or_default(), &more, Beside::Behind));
                }
            },
            Speaker::Reminded => {
                if let Some(text) = waiting.take() {
                    message.add(&text, Beside::Before);
                }
                told.push(message);
            }
            Speaker::Other => {
                told.extend(waiting.take().map(M::of_user));
                told.push(message);
            }
        }
    }
    told.extend(waiting.map(M::of_user));
    told
}

/// The messages with developers' as the system's. Those in front are one, as engines make them where the role
/// is not known.
pub(crate) fn as_system<M: Turn>(messages: Vec<M>) -> Vec<M> {
    let leading = messages.iter().take_while(|message| message.speaker() == Speaker::System).count();
    let joins = messages.iter().take(leading).any(Turn::is_developers);
    let mut told: Vec<M> = Vec::with_capacity(messages.len());
    for (nth, mut message) in messages.into_iter().enumerate() {
        if let Some(first) = told.last_mut().filter(|_| joins && nth < leading) {
            first.join(message);
            continue;
        }
        if message.is_developers() {
            message.make_system();
        }
        told.push(message);
    }
    told
}

/// A system's text in the tags by which models know it in a user's message; once, if it has them already.
fn reminder(text: String) -> String {
    if text.trim_start().starts_with("<system-reminder>") {
        return text;
    }
    format!("<system-reminder>\n{text}\n</system-reminder>")
}

/// The conversation of a request to `/v1/messages` as `keyway-worker` hands it to its model's template, and
/// as it goes translated to others: what the system says late stays where it stands.
///
/// # Errors
/// It is no such request.
pub fn messages_in_place<'a>(
    body: &'a [u8],
    template: &ChatTemplate,
) -> Result<Conversation<'a>, ConversationError> {
    Conversation::from_messages_in_place(body, template, in_front)
}

impl Turn for Message<'_> {
    fn speaker(&self) -> Speaker {
        let role = match self.get("role") {
            Some(Field::Text(role)) => &**role,
            _ => "",
        };
        match (role, self.get("content")) {
            ("system", _) => Speaker::System,
            ("user", Some(_)) | ("tool", Some(Field::Text(_))) => Speaker::Reminded,
            _ => Speaker::Other,
        }
    }

    fn of_user(text: String) -> Self {
        let mut message = Self::default();
        message.set("role", Field::Text("user".into()));
        message.set("content", Field::Text(text.into()));
        message
    }

    fn into_text(self) -> String {
        match self.get("content") {
            Some(Field::Text(text)) => text.clone().into_owned(),
            // What the system says is a text.
            _ => String::new(),
        }
    }

    fn join(&mut self, next: Self) {
        if let Some(Field::Text(text)) = self.get_mut("content") {
            text.to_mut().push_str(&next.into_text());
        }
    }

    fn add(&mut self, added: &str, place: Beside) {
        match self.get_mut("content") {
            Some(Field::Text(text)) => *text = beside(text, added, place).into(),
            Some(parts) => {
                let Some(parts) = parts.items_mut() else { return };
                let at = if place == Beside::Before { 0 } else { parts.len() };
                parts.insert(at, json!({"type": "text", "text": added}));
            }
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who says what; an `a` is the assistant, an `i` a tool whose content is no text.
    #[derive(Debug, Clone, PartialEq, Eq)]
    struct Said(char, String);

    impl Turn for Said {
        fn speaker(&self) -> Speaker {
            match self.0 {
                's' | 'd' => Speaker::System,
                'u' | 't' => Speaker::Reminded,
                _ => Speaker::Other,
            }
        }

        fn is_developers(&self) -> bool {
            self.0 == 'd'
        }

        fn make_system(&mut self) {
            self.0 = 's';
        }

        fn of_user(text: String) -> Self {
            Self('u', text)
        }

        fn into_text(self) -> String {
            self.1
        }

        fn join(&mut self, next: Self) {
            self.1.push_str(&next.1);
        }

        fn add(&mut self, text: &str, place: Beside) {
            self.1 = beside(&self.1, text, place);
        }
    }

    fn told(messages: &[&str], how: impl Fn(Vec<Said>) -> Vec<Said>) -> Vec<String> {
        let said = |text: &&str| Said(text.chars().next().unwrap(), text[1..].to_owned());
        let shown = |Said(speaker, text)| {
            let text = text.replace("<system-reminder>\n", "[").replace("\n</system-reminder>", "]");
            format!("{speaker}{}", text.replace("\n\n", "|"))
        };
        how(messages.iter().map(said).collect()).into_iter().map(shown).collect()
    }

    #[test]
    fn a_late_system_message_is_a_reminder_where_it_stands() {
        for (messages, want) in [
            (&["s1", "u2", "a3"][..], &["s1", "u2", "a3"][..]),
            (&["u2", "a3"], &["u2", "a3"]),
            (&["s1", "s2", "u3"], &["s12", "u3"]),
            (&["s1", "u2", "s3"], &["s1", "u2|[3]"]),
            (&["u2", "s3", "s4", "a5"], &["u2|[3]|[4]", "a5"]),
            (&["u1", "a2", "t3", "s4", "a5"], &["u1", "a2", "t3|[4]", "a5"]),
            (&["u1", "a2", "s3"], &["u1", "a2", "u[3]"]),
            (&["u1", "a2", "s3", "s4", "u5", "s6"], &["u1", "a2", "u[3]|[4]|5|[6]"]),
            (&["u1", "a2", "s3", "a4"], &["u1", "a2", "u[3]", "a4"]),
            (&["u1", "i2", "s3", "a4"], &["u1", "i2", "u[3]", "a4"]),
            (&["u1", "s<system-reminder>\n2\n</system-reminder>"], &["u1|[2]"]),
            (&["u", "s2"], &["u[2]"]),
            (&["s1"], &["s1"]),
            (&[], &[]),
        ] {
            assert_eq!(told(messages, in_front), want, "{messages:?}");
        }
    }

    #[test]
    fn developers_speak_as_the_system_where_the_template_does_not_know_them() {
        for (messages, want) in [
            (&["s1", "s2", "u3", "s4"][..], &["s1", "s2", "u3", "s4"][..]),
            (&["s1", "d2", "s3", "u4", "d5", "d6"], &["s123", "u4", "s5", "s6"]),
            (&["d1", "u2"], &["s1", "u2"]),
            (&["s1", "s2", "u3", "d4"], &["s1", "s2", "u3", "s4"]),
            (&["u1", "d2"], &["u1", "s2"]),
            (&[], &[]),
        ] {
            assert_eq!(told(messages, as_system), want, "{messages:?}");
        }
    }

    /// What was sent once says the same in each later turn, so its cached prefix is found.
    #[test]
    fn each_turn_begins_as_the_one_before() {
        let all = ["s0", "d1", "u2", "s3", "a4", "t5", "d6", "a7", "s8", "u9", "s10", "a11"];
        for length in 2..all.len() {
            for how in [in_front, as_system] {
                let turn = |length: usize| told(&all[..length], how).join("\n");
                assert!(turn(length + 1).starts_with(&turn(length)), "{}", turn(length + 1));
            }
        }
    }
}
