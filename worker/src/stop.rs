//! Stop strings over text that comes in pieces: text is withheld while it may be the beginning of one. Not stop
//! tokens, which the engine knows.

/// Looks for stop strings in one generation's text.
#[derive(Debug)]
pub(crate) struct StopMatcher {
    stops: Vec<String>,
    /// Text that may turn out to be the beginning of a stop string.
    withheld: String,
}

impl StopMatcher {
    /// Empty strings in `stops` would match everywhere and must not be given.
    pub(crate) fn new(stops: Vec<String>) -> Self {
        Self { stops, withheld: String::new() }
    }

    /// Takes more text; returns what may be shown, and whether a stop string was complete (its text and everything
    /// after it is dropped).
    pub(crate) fn push(&mut self, text: &str) -> (String, bool) {
        self.withheld.push_str(text);
        // The one that is complete first, as if the text came character by character.
        let found = |stop: &String| self.withheld.find(stop.as_str()).map(|at| (at + stop.len(), at));
        if let Some((_, at)) = self.stops.iter().filter_map(found).min() {
            self.withheld.truncate(at);
            return (std::mem::take(&mut self.withheld), true);
        }
        let tail = self.withheld.split_off(self.certain_len());
        (std::mem::replace(&mut self.withheld, tail), false)
    }

    /// The text still withheld, when none will follow.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.withheld)
    }

    /// Where the longest end of the text begins that begins a stop string.
    fn certain_len(&self) -> usize {
        let text = &self.withheld;
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let first = text.len().saturating_sub(longest);
        let begins =
            |at: &usize| self.stops.iter().any(|stop| stop.as_bytes().starts_with(&text.as_bytes()[*at..]));
        (first..text.len()).filter(|at| text.is_char_boundary(*at)).find(begins).unwrap_or(text.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(|s| (*s).to_owned()).collect());
        let mut out = Vec::new();
        for piece in pieces {
            let (text, stopped) = matcher.push(piece);
            out.push(text);
            if stopped {
                return (out, true);
            }
        }
        out.push(matcher.finish());
        (out, false)
    }

    #[test]
    fn withholds_only_what_may_become_a_stop() {
        assert_eq!(run(&["END"], &["a E", "N", "x E", "ND b"]).0, ["a ", "", "ENx ", ""]);
        assert_eq!(run(&["END"], &["a EN"]), (vec!["a ".into(), "EN".into()], false));
        assert_eq!(run(&["é!"], &["xé", "?"]).0, ["x", "é?", ""]);
        assert_eq!(run(&[], &["abc"]).0, ["abc", ""]);
    }

    #[test]
    fn the_first_complete_one_of_several_wins() {
        assert_eq!(run(&["abc", "b"], &["abc"]).0.concat(), run(&["abc", "b"], &["a", "b", "c"]).0.concat());
        assert_eq!(run(&["cd", "bcd"], &["abcd"]), (vec!["a".into()], true));
        assert_eq!(run(&["\n\n", "b"], &["a\n", "\nb"]), (vec!["a".into(), String::new()], true));
    }

    proptest! {
        /// However the text is cut into pieces, what is shown is the text up to the first stop string.
        #[test]
        fn cutting_does_not_matter(
            text in "[abé]{0,40}", cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
            stops in prop::collection::vec("[abé]{1,4}", 0..3),
        ) {
            let boundaries: Vec<usize> = text.char_indices().map(|(i, _)| i).chain([text.len()]).collect();
            let mut cuts: Vec<usize> = cuts.iter().map(|c| boundaries[c.index(boundaries.len())]).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let (shown, stopped) = run(&stops, &pieces);
            let cut = boundaries.iter()
                .find_map(|end| stops.iter().filter_map(|s| text[..*end].strip_suffix(s)).min_by_key(|s| s.len()));
            prop_assert_eq!(stopped, cut.is_some());
            prop_assert_eq!(shown.concat(), cut.unwrap_or(&text));
        }
    }
}
