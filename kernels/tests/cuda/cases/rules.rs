//! Rules of rows: each operation in f32 as `worker/src/engine/token_rules.rs` orders them, bit for bit; lists
//! that take tokens are the lists that were made with them; a mask that leaves nothing else holds alone.

use keyway_kernels::cuda::Slice;
use keyway_kernels::cuda::rules::{ROW_WORDS, RowRules, Rule, launch, list, list_words};

use super::{Lab, values};

pub(crate) fn check(lab: &mut Lab<'_>) -> Result<(), String> {
    for vocabulary in if lab.is_large() { vec![77, 1000, 151_936] } else { vec![77, 1000] } {
        rows(lab, vocabulary)?;
        lab.clear();
    }
    form_first(lab)
}

/// What becomes of a row, in f32.
fn applied(row: &mut [f32], rules: &[Rule], by: &RowRules) {
    for rule in rules {
        let Some(logit) = row.get_mut(rule.id as usize) else { continue };
        if rule.is_forbidden || by.holds && rule.is_held {
            *logit = f32::NEG_INFINITY;
        }
        if let Some(bias) = rule.bias {
            *logit += bias;
        }
        if rule.in_prompt || rule.generated > 0 {
            *logit = if *logit > 0.0 { *logit / by.repetition } else { *logit * by.repetition };
        }
        if rule.generated > 0 {
            *logit = *logit - by.frequency * rule.generated as f32 - by.presence;
        }
    }
}

/// Some ids, of every kind and mixture; one is beyond the vocabulary.
fn some_rules(vocabulary: usize, row: usize) -> Vec<Rule> {
    let count = if row == 1 { 1 } else { vocabulary / 3 + 30 };
    let rule = |i: usize| {
        let kind = i * 7 + row;
        Rule {
            id: if i == 5 { vocabulary as u32 + 3 } else { (i * 2 % vocabulary) as u32 },
            generated: [0, 0, 1, 3, 1000][kind % 5],
            in_prompt: kind.is_multiple_of(3),
            bias: (kind % 4 == 1).then_some(-1.5 + (kind % 9) as f32 * 0.37),
            is_held: kind % 11 == 2,
            is_forbidden: kind % 13 == 4,
        }
    };
    (0..count.min(vocabulary / 2)).map(rule).collect()
}

/// The list after a token.
fn taken(rules: &[Rule], token: u32) -> Vec<Rule> {
    let mut rules = rules.to_vec();
    match rules.iter_mut().find(|rule| rule.id == token) {
        Some(rule) => rule.generated += 1,
        None => rules.push(Rule { id: token, generated: 1, ..Rule::default() }),
    }
    rules
}

fn by(row: usize) -> RowRules {
    let [repetition, frequency, presence] =
        [[1.3, 0.5, 0.25], [1.0, 0.0, -1.5], [0.7, 0.31, 0.0], [1.0, 0.0, 0.0]][row % 4];
    RowRules { holds: row.is_multiple_of(2), repetition, frequency, presence, ..RowRules::default() }
}

/// Several steps of several rows: plain ones, lists that take nothing, an id that they know, one that they do
/// not.
fn rows(lab: &mut Lab<'_>, vocabulary: usize) -> Result<(), String> {
    const ROWS: usize = 6;
    let mut rules: Vec<Vec<Rule>> = (0..ROWS).map(|row| some_rules(vocabulary, row)).collect();
    let most = rules.iter().map(Vec::len).max().unwrap_or(0) + 8;
    let lists: Vec<u32> = rules
        .iter()
        .flat_map(|rules| {
            let mut list = list(rules, most);
            list.resize(list_words(most), 0xdead_beef);
            list
        })
        .collect();
    let lists = lab.upload(&lists)?;
    let masks: Vec<u32> =
        (0..vocabulary.div_ceil(32) as u32).map(|i| i.wrapping_mul(0x9e37_79b9) | 1).collect();
    let masks_there = lab.upload(&masks)?;
    for step in 0..3 {
        let tokens: Vec<u32> =
            (0..ROWS).map(|row| ((row * 31 + step * 2 + row % 2) % vocabulary) as u32).collect();
        let takes = |row: usize| row != 2 && (step > 0 || row > 3);
        let of_row = |row: usize| RowRules {
            list: (row > 0).then_some(row * (1 + most)),
            token: takes(row).then_some(row),
            mask: (row % 3 == 2).then_some(0),
            ..by(row)
        };
        let logits: Vec<f32> =
            values(step as u64 + 1, ROWS * vocabulary).iter().map(|v| v.to_f32() * 1.37).collect();
        let mut exact = logits.clone();
        for (row, logits) in exact.chunks_mut(vocabulary).enumerate().skip(1) {
            if row % 3 == 2 {
                mask(logits, &masks);
            }
            if takes(row) {
                rules[row] = taken(&rules[row], tokens[row]);
            }
            applied(logits, &rules[row], &by(row));
        }
        let words: Vec<u32> = (0..ROWS).flat_map(|row| of_row(row).words()).collect();
        let out = run(lab, &logits, &words, lists, masks_there, &tokens)?;
        lab.same(&format!("{vocabulary} ids, step {step}"), &out, &exact)?;
    }
    Ok(())
}

fn mask(row: &mut [f32], mask: &[u32]) {
    for (id, logit) in row.iter_mut().enumerate() {
        if mask[id / 32] >> (id % 32) & 1 == 0 {
            *logit = f32::NEG_INFINITY;
        }
    }
}

fn run(
    lab: &mut Lab<'_>,
    logits: &[f32],
    rows: &[u32],
    lists: Slice<u32>,
    masks: Slice<u32>,
    tokens: &[u32],
) -> Result<Vec<f32>, String> {
    let vocabulary = logits.len() / (rows.len() / ROW_WORDS);
    let (logits, rows, tokens) = (lab.upload(logits)?, lab.upload(rows)?, lab.upload(tokens)?);
    lab.launch(launch(logits, vocabulary, rows, lists, masks, tokens))?;
    lab.download(logits)
}

/// Two ids that a mask leaves: if both may not come for another reason, it holds alone; if one may, all does.
fn form_first(lab: &mut Lab<'_>) -> Result<(), String> {
    let vocabulary = 300;
    let logits: Vec<f32> = values(9, vocabulary).iter().map(|v| v.to_f32()).collect();
    let mut bits = vec![0u32; vocabulary.div_ceil(32)];
    for id in [40, 290] {
        bits[id / 32] |= 1 << (id % 32);
    }
    let held = |id: u32| Rule { id, is_held: true, bias: Some(0.5), ..Rule::default() };
    for (second, holds) in [(290, true), (290, false), (7, true)] {
        let rules = [held(40), held(second), Rule { id: 3, is_forbidden: true, ..Rule::default() }];
        let by = RowRules { list: Some(0), mask: Some(0), holds, repetition: 1.0, ..RowRules::default() };
        let mut exact = logits.clone();
        mask(&mut exact, &bits);
        let alone = exact.clone();
        applied(&mut exact, &rules, &by);
        let nothing = exact.iter().all(|logit| *logit == f32::NEG_INFINITY);
        if nothing != (second == 290 && holds) {
            return Err("the case tests nothing".into());
        }
        let (lists, masks) = (lab.upload(&list(&rules, 3))?, lab.upload(&bits)?);
        let out = run(lab, &logits, &by.words(), lists, masks, &[0])?;
        lab.same("a mask that leaves two", &out, if nothing { &alone } else { &exact })?;
    }
    // A list that is full takes no further id and stays whole.
    let (full, by) = (list(&[held(1), held(2)], 2), RowRules { list: Some(0), token: Some(0), ..by(0) });
    let lists = lab.upload(&full)?;
    let masks = lab.upload(&[0u32])?;
    run(lab, &logits, &by.words(), lists, masks, &[5])?;
    let after = lab.download(lists)?;
    lab.same("a full list", &after, &full)
}
