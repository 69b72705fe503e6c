//! Requests that say by when they want their first token, beside others, at nineteen twentieths of what the
//! workers can do.

use super::*;
use crate::waiting_room::fair::tests::uniform;

const WORKERS: usize = 4;
/// Blocks of a prompt, which take a worker 1.024 s.
const BLOCKS: u64 = 10;
const PROMPTS: usize = 1_500;
const SEEDS: u64 = 3;

/// Prompts of one length, which come as Poisson's do at this share of what the workers can do.
fn prompts(load: f64, seed: u64) -> Vec<Prompt> {
    let mut random = uniform(seed);
    let every_s = BLOCKS as f64 * BLOCK as f64 / RATE_PER_S / WORKERS as f64 / load;
    let mut at = 0.0;
    let prompt = |i: usize| {
        at -= (1.0 - random()).ln() * every_s;
        Prompt { at, prefix: i as u32, shared: 0, own: BLOCKS }
    };
    (0..PROMPTS).map(prompt).collect()
}

/// Of each third of the requests the share that had its first token within `within` seconds, and the mean
/// time of all.
fn thirds(load: f64, wants: [Option<f64>; 3], within: f64) -> ([f64; 3], f64) {
    let (mut kept, mut sum) = ([0.0; 3], 0.0);
    for seed in 1..=SEEDS {
        let mut fleet = Fleet::new(WORKERS);
        let share = |i: usize| Share { objective: wants[i % 3].map(s), ..Share::default() };
        run_as(&mut fleet, RoomRules::default(), &prompts(load, seed), share);
        sum += mean(&fleet);
        for (i, ttft) in &fleet.ttft {
            kept[i % 3] += f64::from(u8::from(*ttft <= within)) / (PROMPTS / 3) as f64 / SEEDS as f64;
        }
    }
    (kept, sum / SEEDS as f64)
}

#[test]
fn who_says_when_has_it_by_then_and_the_others_lose_little() {
    let (plain, mean_of_plain) = thirds(0.95, [None; 3], 4.0);
    let (asked, mean_of_asked) = thirds(0.95, [Some(4.0), None, None], 4.0);
    println!("kept {plain:?} -> {asked:?}; mean {mean_of_plain:.2} -> {mean_of_asked:.2} s");
    assert!(plain[0] < 0.9 && asked[0] > 0.99, "{plain:?} {asked:?}");
    assert!(mean_of_asked < 1.02 * mean_of_plain, "{mean_of_plain} {mean_of_asked}");
}

#[test]
fn a_lax_objective_lets_a_tight_one_go_first() {
    let (lax, _) = thirds(0.95, [Some(4.0), Some(60.0), Some(60.0)], 60.0);
    let (tight, _) = thirds(0.95, [Some(4.0), Some(60.0), Some(60.0)], 4.0);
    println!("within 60 s {lax:?}, within 4 s {tight:?}");
    assert!(tight[0] > 0.99 && lax.iter().all(|kept| *kept > 0.99), "{tight:?} {lax:?}");
}

#[test]
fn under_too_much_load_what_is_late_yields_to_what_is_not() {
    // More comes than can be done. What wants it by then is nine tenths of that, and comes in bursts.
    let (asked, _) = thirds(1.3, [Some(4.0), Some(4.0), None], 4.0);
    let (plain, _) = thirds(1.3, [None; 3], 4.0);
    println!("kept {plain:?} -> {asked:?}");
    assert!(plain[0] < 0.1 && asked[0] > 0.8 && asked[1] > 0.8, "{plain:?} {asked:?}");
}
