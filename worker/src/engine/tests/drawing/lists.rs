//! What a backend that draws does beside: lists of rules that stay from step to step, and scores; as simply
//! as can be.

use std::collections::HashMap;

use crate::engine::backend::{Parameters, Rule, Rules, Score};

/// How a row is drawn, kept until its step runs.
pub(super) struct Kept {
    pub(super) by: Parameters,
    pub(super) rules: Option<KeptRules>,
    pub(super) mask: Option<Vec<u32>>,
    pub(super) score: Option<usize>,
}

pub(super) struct KeptRules {
    sequence: u64,
    holds: bool,
    penalties: [f32; 3],
    /// The list, where it was not there; and whether it takes the last token of this row of chunks.
    made: Option<Vec<Rule>>,
    takes: bool,
    pub(super) chunk: usize,
}

/// Lists that stay from step to step, as far as they were told of and as they are.
#[derive(Default)]
pub(super) struct Lists {
    told: HashMap<u64, Option<usize>>,
    own: HashMap<u64, Vec<Rule>>,
    asked: usize,
}

impl Lists {
    /// Every third list is forgotten.
    pub(super) fn keep(&mut self, rules: &Rules<'_>, chunk: usize, is_pending: bool) -> KeptRules {
        self.asked += 1;
        let told =
            self.told.insert(rules.sequence, rules.generated).filter(|_| !self.asked.is_multiple_of(3));
        let known = match (told, rules.generated) {
            (Some(own), wanted) if own == wanted => Some(false),
            (Some(Some(own)), Some(wanted)) if own + 1 == wanted => Some(true),
            _ => None,
        };
        let made = known.is_none().then(|| rules.list.list());
        let takes = known.unwrap_or(is_pending && rules.generated.is_some());
        let Rules { sequence, holds, penalties, .. } = *rules;
        KeptRules { sequence, holds, penalties, made, takes, chunk }
    }

    pub(super) fn apply(&mut self, rules: KeptRules, token: u32, row: &mut [f32]) {
        let list = self.own.entry(rules.sequence).or_default();
        if let Some(made) = rules.made {
            *list = made;
        }
        if rules.takes {
            match list.iter_mut().find(|rule| rule.id == token) {
                Some(rule) => rule.generated += 1,
                None => list.push(Rule { id: token, generated: 1, ..Rule::default() }),
            }
        }
        let [repetition, frequency, presence] = rules.penalties;
        for rule in list.iter() {
            let Some(logit) = row.get_mut(rule.id as usize) else { continue };
            if rule.is_forbidden || rule.is_held && rules.holds {
                *logit = f32::NEG_INFINITY;
            }
            *logit += rule.bias.unwrap_or(0.0);
            if rule.in_prompt || rule.generated > 0 {
                *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            }
            if rule.generated > 0 {
                *logit = *logit - frequency * rule.generated as f32 - presence;
            }
        }
    }
}

/// By sorting the row.
pub(super) fn score(row: &[f32], token: u32, top: usize) -> Score {
    let mut ids: Vec<u32> = (0..row.len() as u32).collect();
    ids.sort_by(|a, b| row[*b as usize].partial_cmp(&row[*a as usize]).unwrap().then(a.cmp(b)));
    let (maximum, logit) = (row[ids[0] as usize], row[token as usize]);
    let weight = |logit: &f32| (keyway_kernels::scalar::exp(logit - maximum) * 2.0_f32.powi(40)) as u64;
    Score {
        logit,
        maximum,
        total: row.iter().map(weight).sum(),
        rank: row.iter().filter(|other| **other >= logit).count() as u32,
        top: ids.into_iter().take(top).map(|id| (id, row[id as usize])).collect(),
    }
}
