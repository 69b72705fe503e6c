//! Names of what a request says and an engine of chats cannot be told.

/// Names that are told, at most, and bytes of each: they are a client's text in a header.
const NAMES_MAX: usize = 32;
const NAME_BYTES_MAX: usize = 64;

/// Each name once, in the order in which they were found.
#[derive(Debug, Default)]
pub(crate) struct Ignored {
    names: Vec<String>,
}

impl Ignored {
    /// Notes a field by its name.
    pub(crate) fn note(&mut self, name: impl Into<String>) {
        let name = name.into();
        let is_word = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
        let is_told = name.len() <= NAME_BYTES_MAX && name.bytes().all(is_word);
        if is_told && self.names.len() < NAMES_MAX && !self.names.contains(&name) {
            self.names.push(name);
        }
    }

    /// Notes fields of an object that is somewhere in this part of the request.
    pub(crate) fn note_all(&mut self, within: &str, names: impl Iterator<Item = String>) {
        names.for_each(|name| self.note(format!("{within}.{name}")));
    }

    pub(crate) fn into_names(self) -> Vec<String> {
        self.names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_words_told_once_and_few() {
        let mut ignored = Ignored::default();
        for name in ["a.b", "a b", "a.b", "c\r\n", &"x".repeat(65), "d"] {
            ignored.note(name);
        }
        assert_eq!(ignored.names, ["a.b", "d"]);
        (0..99).for_each(|i| ignored.note(i.to_string()));
        assert_eq!(ignored.into_names().len(), NAMES_MAX);
    }
}
