//! What one subscriber wants. No sockets.

use crate::limits::{SUBSCRIPTIONS_MAX, TOPIC_BYTES_MAX};

/// The topics of one subscriber, and from which published message on it wants each.
///
/// A topic is wanted or not, however often that was said: libzmq says every subscription of its user's, but
/// only the last cancellation of a topic.
#[derive(Debug, Default)]
pub(crate) struct Topics(Vec<(Box<[u8]>, u64)>);

impl Topics {
    /// Takes a topic up, from the message with this number on; false where it is too long, or one too many.
    #[must_use]
    pub(crate) fn add(&mut self, topic: &[u8], from: u64) -> bool {
        if self.0.iter().any(|(known, _)| **known == *topic) {
            return true;
        }
        if topic.len() > TOPIC_BYTES_MAX || self.0.len() >= SUBSCRIPTIONS_MAX {
            return false;
        }
        // A copy, lest a few bytes keep a whole read alive.
        self.0.push((topic.into(), from));
        true
    }

    /// Drops a topic, if it was taken up.
    pub(crate) fn remove(&mut self, topic: &[u8]) {
        self.0.retain(|(known, _)| **known != *topic);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the subscriber wants a message of this number whose first frame is this.
    pub(crate) fn want(&self, number: u64, frame: &[u8]) -> bool {
        self.0.iter().any(|(topic, from)| *from <= number && frame.starts_with(topic))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_topic_is_a_prefix_and_is_wanted_from_when_it_was_said() {
        let mut topics = Topics::default();
        assert!(topics.is_empty() && !topics.want(9, b"kv"));
        assert!(topics.add(b"kv@", 5));
        assert!(!topics.want(4, b"kv@a") && topics.want(5, b"kv@a"));
        assert!(topics.want(5, b"kv@") && !topics.want(5, b"kv") && !topics.want(5, b""));
        // Said twice, it was said the first time, and is cancelled by one word.
        assert!(topics.add(b"kv@", 9) && topics.want(5, b"kv@a"));
        topics.remove(b"kv");
        topics.remove(b"kv@");
        assert!(topics.is_empty());
        assert!(topics.add(b"", 0) && topics.want(0, b"") && topics.want(0, b"any"));
    }

    #[test]
    fn topics_are_so_many_and_so_long() {
        let mut topics = Topics::default();
        assert!(!topics.add(&[7; TOPIC_BYTES_MAX + 1], 0));
        assert!(topics.add(&[7; TOPIC_BYTES_MAX], 0));
        for topic in 1..SUBSCRIPTIONS_MAX {
            assert!(topics.add(&topic.to_le_bytes(), 0));
        }
        assert!(!topics.add(b"one more", 0));
        assert!(topics.add(&[7; TOPIC_BYTES_MAX], 0), "it is known");
        topics.remove(&1_usize.to_le_bytes());
        assert!(topics.add(b"one more", 0));
    }
}
