//! Documents that one gets through: short pages, a heading every few lines, short sentences. Tables and code
//! are looked up, not read, and do not count.
#![allow(clippy::expect_used, reason = "helpers of tests fail the test by panicking")]

use keyway_tests::sources;

/// Words of a page.
const PAGE_WORDS_MAX: usize = 1200;
/// Words under one heading.
const SECTION_WORDS_MAX: usize = 150;
/// Words of one sentence.
const SENTENCE_WORDS_MAX: usize = 30;
/// Words of the sentence in the middle, shortest to longest, where a page has enough of them.
const SENTENCE_WORDS_MEDIAN_MAX: usize = 14;
/// Sentences from which on a page's median says something.
const SENTENCES_MIN: usize = 20;

/// What a page is to a reader: for each heading the paragraphs and list items under it.
#[derive(Debug, Default)]
struct Page {
    sections: Vec<Vec<String>>,
}

impl Page {
    fn read(text: &str) -> Self {
        let mut page = Self { sections: vec![Vec::new()] };
        let (mut is_code, mut goes_on) = (false, false);
        for line in text.lines() {
            if line.trim_start().starts_with("```") {
                (is_code, goes_on) = (!is_code, false);
            } else if line.starts_with('#') && !is_code {
                page.sections.push(Vec::new());
                goes_on = false;
            } else if is_code || line.starts_with('|') || line.starts_with("    ") || line.trim().is_empty() {
                goes_on = false;
            } else {
                let section = page.sections.last_mut().expect("there is one");
                match (section.last_mut(), item(line)) {
                    (_, Some(text)) => section.push(text.to_owned()),
                    (Some(last), None) if goes_on => *last = format!("{last} {}", line.trim()),
                    (_, None) => section.push(line.trim().to_owned()),
                }
                goes_on = true;
            }
        }
        page
    }

    /// Words of each sentence that has more than one, with its beginning.
    fn sentences(&self) -> Vec<(usize, String)> {
        let paragraphs = self.sections.iter().flatten();
        let all = paragraphs.flat_map(|paragraph| {
            let words: Vec<&str> = paragraph.split_whitespace().collect();
            let mut sentences = vec![Vec::new()];
            for (i, word) in words.iter().enumerate() {
                sentences.last_mut().expect("there is one").push(*word);
                if words.get(i + 1).is_some_and(|next| is_end(word, next)) {
                    sentences.push(Vec::new());
                }
            }
            sentences
        });
        let told = |words: Vec<&str>| (words.len(), words[..words.len().min(6)].join(" "));
        all.filter(|words| words.len() > 1).map(told).collect()
    }

    /// What is wrong with it.
    fn faults(&self) -> Vec<String> {
        let words =
            |section: &Vec<String>| section.iter().map(|text| text.split_whitespace().count()).sum::<usize>();
        let mut faults = Vec::new();
        let whole: usize = self.sections.iter().map(words).sum();
        if whole > PAGE_WORDS_MAX {
            faults.push(format!("{whole} words, at most {PAGE_WORDS_MAX}: make it two pages"));
        }
        for section in self.sections.iter().filter(|section| words(section) > SECTION_WORDS_MAX) {
            let (count, text) = (words(section), section[0].chars().take(40).collect::<String>());
            faults.push(format!("{count} words under one heading, at most {SECTION_WORDS_MAX}: `{text}…`"));
        }
        let mut sentences = self.sentences();
        for (count, text) in sentences.iter().filter(|(count, _)| *count > SENTENCE_WORDS_MAX) {
            faults.push(format!("a sentence of {count} words, at most {SENTENCE_WORDS_MAX}: `{text} …`"));
        }
        sentences.sort_unstable();
        let median = sentences.get(sentences.len() / 2).map_or(0, |(count, _)| *count);
        if sentences.len() >= SENTENCES_MIN && median > SENTENCE_WORDS_MEDIAN_MAX {
            faults
                .push(format!("the median sentence has {median} words, at most {SENTENCE_WORDS_MEDIAN_MAX}"));
        }
        faults
    }
}

/// The text of a line that begins a list's item.
fn item(line: &str) -> Option<&str> {
    let text = line.trim_start();
    let digits = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let number = if digits.len() < text.len() { digits.strip_prefix(". ") } else { None };
    number.or_else(|| text.strip_prefix("- ")).or_else(|| text.strip_prefix("* "))
}

/// Whether a sentence ends with `word`, as `next` shows.
fn is_end(word: &str, next: &str) -> bool {
    let bare = word.trim_end_matches(['"', ')', '*', '`']);
    let begins = |c: char| c.is_uppercase() || c.is_ascii_digit() || "`*[(\"".contains(c);
    bare.ends_with(['.', '!', '?', ':', ';']) && next.starts_with(begins)
}

#[test]
fn documents_are_easily_read() {
    let documents = sources::texts(&["md"]);
    assert!(documents.len() > 100, "{}", documents.len());
    let faults: Vec<String> = documents
        .iter()
        .flat_map(|(path, text)| {
            Page::read(text).faults().into_iter().map(move |fault| format!("{path}: {fault}"))
        })
        .collect();
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn what_is_hard_to_read_is_seen() {
    let sentence = |words: usize| format!("A{} b.", " b".repeat(words - 2));
    let of = |text: &str| Page::read(text).faults();
    let fine = format!("# A\n\n{}\n", format!("{} ", sentence(10)).repeat(14));
    assert!(of(&fine).is_empty(), "{:?}", of(&fine));
    for (text, want) in [
        (format!("# A\n\n{}\n", sentence(31)), "a sentence of 31 words"),
        (format!("# A\n\n- {}\n- {}\n", sentence(31), sentence(3)), "a sentence of 31 words"),
        (format!("# A\n\n{}\n", format!("{} ", sentence(10)).repeat(16)), "160 words under one heading"),
        (fine.repeat(9), "1260 words, at most 1200"),
        (
            format!("# A\n\n{0}\n\n# B\n\n{0}", format!("{} ", sentence(15)).repeat(10)),
            "median sentence has 15 words",
        ),
    ] {
        let faults = of(&text);
        assert!(faults.len() == 1 && faults[0].contains(want), "{want}: {faults:?}");
    }
    // A table, code and a line of a heading are not read as prose.
    let apart = format!("# A\n\n| {0} |\n\n```text\n{0}\n```\n\n    {0}\n", "b ".repeat(400));
    assert!(of(&apart).is_empty(), "{:?}", of(&apart));
}
