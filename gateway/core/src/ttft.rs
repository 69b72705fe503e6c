//! How long a worker takes to the first token of a request, fitted from its answers: something for each
//! request, something for each prompt token that is computed before, and something for each answer under way,
//! which takes its part of every step.
//!
//! Least squares that forget, of relative errors: short prompts count as long ones do. They forget what is
//! seen anew alone (R. Kulhavý, "Restricted exponential forgetting in real-time identification", Automatica
//! 1987): a worker that is idle for an hour is still known under load. One answer pulls no more than one that
//! is off by its whole prediction (Huber's weights), as a stalled batch or a prompt that was cached after all
//! says little of the next.
//!
//! It predicts; it does not choose. The cost ([`crate::cost`]) has the same price for a running request at
//! each worker, since one that is learned by few would draw or repel all.

/// Terms: a constant, a thousand tokens, an answer under way.
const TERMS: usize = 3;
/// Tokens of a unit of the second term: terms of about one size keep the sums exact.
const TOKENS: f64 = 1024.0;
/// What is left of an answer's weight after each further one like it: some 25 count.
const KEPT: f64 = 0.96;
/// An answer that is off by more than this share of its prediction pulls as one that is off by that.
const OFF_MAX: f64 = 1.0;
/// Milliseconds that are added to a prediction where an error is set against it: below them, time is noise.
const NOISE_MS: f64 = 5.0;
/// Answers before it says anything.
const ANSWERS_MIN: u32 = 16;
/// How unsure it is of each term at first, as a variance.
const UNSURE: [f64; TERMS] = [1e6, 1e8, 1e4];
/// Before any answer: of a large GPU, an eight-billion-parameter model.
const PRIOR: [f64; TERMS] = [10.0, TOKENS / 8.0, 0.0];

/// What a request finds at a worker when it is sent there.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Before {
    /// Prompt tokens to be computed before its first one, its own among them.
    pub tokens: f64,
    /// Requests whose answers are under way.
    pub answering: f64,
}

/// The fit of one worker.
#[derive(Debug, Clone, PartialEq)]
pub struct TtftFit {
    /// Milliseconds of each term.
    ms: [f64; TERMS],
    /// The inverse of the terms' sums of products.
    unsure: [[f64; TERMS]; TERMS],
    answers: u32,
}

impl Default for TtftFit {
    fn default() -> Self {
        let mut unsure = [[0.0; TERMS]; TERMS];
        for (term, row) in unsure.iter_mut().enumerate() {
            row[term] = UNSURE[term];
        }
        Self { ms: PRIOR, unsure, answers: 0 }
    }
}

impl Before {
    /// What it finds if it counts already as one whose answer is under way.
    #[must_use]
    pub fn without_itself(self) -> Self {
        Self { answering: (self.answering - 1.0).max(0.0), ..self }
    }

    fn terms(self) -> [f64; TERMS] {
        [1.0, self.tokens / TOKENS, self.answering]
    }
}

impl TtftFit {
    /// Milliseconds to the first token of a request that finds this, once enough answers have told.
    pub fn predicted_ms(&self, before: Before) -> Option<f64> {
        (self.answers >= ANSWERS_MIN).then(|| self.guess_ms(&before.terms()))
    }

    /// The first token came so many milliseconds after the request was sent. What was predicted of it, if
    /// anything was.
    pub fn observe(&mut self, before: Before, ms: f64) -> Option<f64> {
        if !(ms.is_finite() && ms >= 0.0 && before.tokens.is_finite() && before.answering.is_finite()) {
            return None;
        }
        let terms = before.terms();
        let guess = self.guess_ms(&terms);
        let predicted = (self.answers >= ANSWERS_MIN).then_some(guess);
        let scale = guess + NOISE_MS;
        let off = (ms - guess) / scale;
        // Huber's weight: its pull grows no further than that of one that is off by so much.
        let weight = (OFF_MAX / off.abs()).min(1.0);
        let scaled = terms.map(|term| term / scale);
        let toward = self.unsure.map(|row| dot(&row, &scaled));
        let unsure = weight * dot(&scaled, &toward);
        if unsure < f64::MIN_POSITIVE || !unsure.is_finite() {
            return predicted;
        }
        for (ms, toward) in self.ms.iter_mut().zip(&toward) {
            // No term takes time away.
            *ms = (*ms + toward * weight * off / (1.0 + unsure)).max(0.0);
        }
        // Below 0 where this answer says less than is forgotten for it.
        let kept = KEPT - (1.0 - KEPT) / unsure;
        let less = weight / (1.0 / kept + unsure);
        for (row, of_row) in self.unsure.iter_mut().zip(&toward) {
            for (cell, of_column) in row.iter_mut().zip(&toward) {
                *cell -= of_row * of_column * less;
            }
        }
        self.answers = self.answers.saturating_add(1);
        predicted
    }

    fn guess_ms(&self, terms: &[f64; TERMS]) -> f64 {
        dot(&self.ms, terms)
    }
}

fn dot(one: &[f64; TERMS], other: &[f64; TERMS]) -> f64 {
    one.iter().zip(other).map(|(one, other)| one * other).sum()
}

#[cfg(test)]
mod tests;
