//! A generation broken off after any token goes on elsewhere as if it had never been broken.

use super::*;

/// The rest of `request`'s tokens after `taken` of `all`, on an engine of its own or one that is busy.
fn resumed(setup: Setup, request: &GenerationRequest, all: &[TokenEvent], taken: usize) -> Vec<TokenEvent> {
    let output_ids: Vec<u32> = all[..taken].iter().map(|e| e.token).collect();
    let mut engine = engine(setup);
    let mut generations = vec![add(&mut engine, GenerationRequest { output_ids, ..request.clone() })];
    if setup.limits.max_running > 1 {
        generations.push(add(&mut engine, request.clone()));
    }
    finish(&mut engine, generations).swap_remove(0)
}

#[test]
fn a_cut_at_every_token_changes_nothing() {
    let busy = Setup { groups: HYBRID, num_blocks: 30, ..ROOMY };
    let elsewhere =
        Setup { block_size: 7, limits: StepLimits { max_batched_tokens: 5, max_running: 1 }, ..busy };
    let prompt: Vec<u32> = (0..21).collect();
    for request in [request(&prompt, 24, 0.0), request(&prompt, 24, 0.9)] {
        let mut engine = engine(Setup { groups: HYBRID, ..ROOMY });
        let generation = add(&mut engine, GenerationRequest { ignore_eos: true, ..request.clone() });
        let all = finish(&mut engine, vec![generation]).remove(0);
        assert_eq!(all.len(), 24);
        for taken in 0..24 {
            for setup in [busy, elsewhere] {
                let request = GenerationRequest { ignore_eos: true, ..request.clone() };
                let rest = resumed(setup, &request, &all, taken);
                let ids =
                    |events: &[TokenEvent]| events.iter().map(|e| (e.token, e.finish)).collect::<Vec<_>>();
                assert_eq!(ids(&rest), ids(&all[taken..]), "cut after {taken} tokens");
            }
        }
    }
}

#[test]
fn cached_tokens_never_exceed_the_prompt_though_more_is_cached() {
    let mut engine = engine(ROOMY);
    let request = GenerationRequest { ignore_eos: true, ..request(&[1; 10], 20, 0.0) };
    let first = add(&mut engine, request.clone());
    let all = finish(&mut engine, vec![first]).remove(0);
    let output_ids: Vec<u32> = all[..all.len() - 1].iter().map(|e| e.token).collect();
    let again = add(&mut engine, GenerationRequest { output_ids, ..request });
    let rest = finish(&mut engine, vec![again]).remove(0);
    assert_eq!(rest[0].cached_tokens, 10);
    assert_eq!(engine.metrics.cached_tokens.get(), 10);
}
