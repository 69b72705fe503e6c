//! Stop strings over text that comes in pieces: text is withheld while it may be the beginning of one. Not
//! stop tokens, which the engine knows.

/// A request's stop strings.
#[derive(Debug, Clone, Default)]
pub(crate) struct StopStrings {
    /// None of them empty: that would match everywhere.
    pub(crate) texts: Vec<String>,
    /// Whether the one that ends the text is shown.
    pub(crate) shown: bool,
    /// They do not count in the text of the first so many tokens.
    pub(crate) min_tokens: usize,
}

/// Looks for stop strings in one generation's text.
#[derive(Debug)]
pub(crate) struct StopMatcher {
    stops: StopStrings,
    /// Text that may turn out to be the beginning of a stop string.
    withheld: String,
}

impl StopMatcher {
    pub(crate) fn new(stops: StopStrings) -> Self {
        Self { stops, withheld: String::new() }
    }

    /// Takes the text of the generation's token number `tokens`, counted from 1; returns what may be shown,
    /// and the stop string that is complete, if one is: its text, unless it is to be shown, and everything
    /// after it is dropped.
    pub(crate) fn push(&mut self, text: &str, tokens: usize) -> (String, Option<&str>) {
        if tokens <= self.stops.min_tokens {
            return (text.to_owned(), None);
        }
        self.withheld.push_str(text);
        // The one that is complete first, as if the text came character by character.
        let found = |(i, stop): (usize, &String)| {
            self.withheld.find(stop.as_str()).map(|at| (at + stop.len(), at, i))
        };
        if let Some((end, at, i)) = self.stops.texts.iter().enumerate().filter_map(found).min() {
            self.withheld.truncate(if self.stops.shown { end } else { at });
            return (std::mem::take(&mut self.withheld), Some(&self.stops.texts[i]));
        }
        let tail = self.withheld.split_off(self.certain_len());
        (std::mem::replace(&mut self.withheld, tail), None)
    }

    /// The text still withheld, when none will follow.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.withheld)
    }

    /// Where the longest end of the text begins that begins a stop string.
    fn certain_len(&self) -> usize {
        let text = &self.withheld;
        let longest = self.stops.texts.iter().map(String::len).max().unwrap_or(0);
        let first = text.len().saturating_sub(longest);
        let begins = |at: &usize| {
            self.stops.texts.iter().any(|stop| stop.as_bytes().starts_with(&text.as_bytes()[*at..]))
        };
        (first..text.len()).filter(|at| text.is_char_boundary(*at)).find(begins).unwrap_or(text.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let texts = stops.iter().map(|s| (*s).to_owned()).collect();
        let mut matcher = StopMatcher::new(StopStrings { texts, ..StopStrings::default() });
        let mut out = Vec::new();
        for piece in pieces {
            let (text, stopped) = matcher.push(piece, 1);
            out.push(text);
            if stopped.is_some() {
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

    #[test]
    fn a_stop_may_be_shown_and_does_not_count_before_its_time() {
        let texts = vec!["END".to_owned()];
        let mut matcher = StopMatcher::new(StopStrings { texts: texts.clone(), shown: true, min_tokens: 0 });
        assert_eq!(matcher.push("a END b", 1), ("a END".to_owned(), Some("END")));
        let mut matcher = StopMatcher::new(StopStrings { texts, shown: false, min_tokens: 2 });
        assert_eq!(matcher.push("END", 2), ("END".to_owned(), None));
        assert_eq!(matcher.push("xEND", 3), ("x".to_owned(), Some("END")));
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
