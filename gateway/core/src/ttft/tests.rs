//! What is learned from answers of all kinds, and what is not.

use proptest::prelude::*;

use super::*;

/// What requests find, of all kinds: few tokens and many, an idle worker and a busy one.
fn found(i: u64) -> Before {
    Before { tokens: (100 + 7_919 * i % 9_000) as f64, answering: (13 * i % 17) as f64 }
}

/// Answers of a worker with these terms, every fifth of them `worst` times as late.
fn fitted(fit: &mut TtftFit, (base_ms, ms_per_token, ms_per_answer): (f64, f64, f64), worst: f64) {
    for i in 0..200 {
        let before = found(i);
        let ms = base_ms + before.tokens * ms_per_token + before.answering * ms_per_answer;
        fit.observe(before, if i % 5 == 3 { ms * worst } else { ms });
    }
}

#[test]
fn each_term_is_found() {
    for terms in [(20.0, 0.15, 0.0), (0.0, 0.02, 3.0), (200.0, 1.5, 40.0), (2.0, 0.0, 0.0)] {
        let mut fit = TtftFit::default();
        fitted(&mut fit, terms, 1.0);
        for i in 0..40 {
            let before = found(1_000 + i);
            let want = terms.0 + before.tokens * terms.1 + before.answering * terms.2;
            let got = fit.predicted_ms(before).unwrap();
            assert!(
                (got / want - 1.0).abs() < 0.02 || (got - want).abs() < 1.0,
                "{terms:?}: {got} for {want}"
            );
        }
    }
}

/// Without the bound on what one answer says, a hundredfold fifth would make predictions twenty times as
/// high.
#[test]
fn answers_that_are_far_off_move_it_little() {
    for worst in [0.0, 100.0] {
        let mut fit = TtftFit::default();
        fitted(&mut fit, (20.0, 0.15, 2.0), worst);
        let before = Before { tokens: 4_000.0, answering: 8.0 };
        let (got, want) = (fit.predicted_ms(before).unwrap(), 20.0 + 600.0 + 16.0);
        assert!((0.6..1.7).contains(&(got / want)), "{worst}: {got} for {want}");
    }
}

#[test]
fn a_worker_that_changes_is_followed() {
    let mut fit = TtftFit::default();
    fitted(&mut fit, (20.0, 0.15, 0.0), 1.0);
    fitted(&mut fit, (20.0, 0.6, 0.0), 1.0);
    let before = Before { tokens: 4_000.0, answering: 8.0 };
    let got = fit.predicted_ms(before).unwrap();
    assert!((got / 2_420.0 - 1.0).abs() < 0.05, "{got}");
}

#[test]
fn few_answers_tell_nothing_and_then_each_is_compared_with_what_was_known_before() {
    let mut fit = TtftFit::default();
    let before = Before { tokens: 1_024.0, answering: 0.0 };
    for _ in 0..ANSWERS_MIN {
        assert_eq!((fit.predicted_ms(before), fit.observe(before, 500.0)), (None, None));
    }
    let predicted = fit.predicted_ms(before);
    assert!(predicted.is_some() && fit.observe(before, 5_000.0) == predicted);
    assert!(fit.predicted_ms(before) > predicted);
}

#[test]
fn a_request_that_counts_is_not_in_its_own_way() {
    let before = |answering| Before { tokens: 3.0, answering };
    assert_eq!(before(4.0).without_itself(), before(3.0));
    assert_eq!(before(0.0).without_itself(), before(0.0));
}

proptest! {
    /// Whatever comes, and however long nothing varies, predictions are times, and what is seen for long
    /// enough is believed.
    #[test]
    fn predictions_are_times_and_come_round(
        seen in prop::collection::vec((any::<f64>(), any::<f64>(), any::<f64>()), 0..80),
        (tokens, answering, ms) in (0.0..2e5_f64, 0.0..500.0_f64, 1.0..1e5_f64),
    ) {
        let mut fit = TtftFit::default();
        let at = Before { tokens, answering };
        for (tokens, answering, ms) in seen {
            fit.observe(Before { tokens: tokens.abs(), answering: answering.abs() }, ms);
            let guess = fit.predicted_ms(at).unwrap_or(0.0);
            prop_assert!(guess.is_finite() && guess >= 0.0, "{guess}");
        }
        let mut fit = TtftFit::default();
        for _ in 0..3_000 {
            fit.observe(at, ms);
        }
        let guess = fit.predicted_ms(at).unwrap();
        prop_assert!((guess / ms - 1.0).abs() < 0.1 || (guess - ms).abs() < 10.0, "{guess} for {ms}");
    }
}
