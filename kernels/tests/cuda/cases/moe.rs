//! A mixture-of-experts layer: the router's choice, the grouping, the grouped products with their gates, the
//! sum; and that no row's result depends on its company or on how the work is cut.

use half::bf16;
use keyway_kernels::cuda::moe::{GroupedSlots, RouterSums, are_few, choose, combine, group, route};
use keyway_kernels::cuda::rope::NO_SLOT;
use keyway_kernels::moe::{GroupScore, Grouping, Groups, Routing, Scoring, combine_oracle, route_oracle};

use super::{BF16, Lab, values, wide};

const PLAIN: Routing =
    Routing { top: 3, scoring: Scoring::SoftmaxAll, renormalise: true, scale: 1.0, groups: None };

pub(crate) fn check(lab: &mut Lab<'_>) -> Result<(), String> {
    routes(lab)?;
    groups(lab)?;
    sums(lab)?;
    fillers(lab)?;
    few(lab)
}

/// Logits whose scores differ by more than an exponential's error, but for some that are equal.
fn logits(seed: u64, tokens: usize, experts: usize) -> Vec<f32> {
    let noise = wide(&values(seed, tokens * experts));
    let spread = |i: usize| ((i * 37 + i / experts * 11) % experts) as f32 / experts as f32;
    (0..noise.len()).map(|i| 6.0 * spread(i) + if noise[i].abs() > 50.0 { 1.0 } else { 0.0 }).collect()
}

fn routes(lab: &mut Lab<'_>) -> Result<(), String> {
    let grouped = |by| Some(Groups { count: 4, keep: 2, by });
    let routings = [
        PLAIN,
        Routing { top: 1, renormalise: false, ..PLAIN },
        Routing { top: 4, scoring: Scoring::SoftmaxTop, renormalise: false, ..PLAIN },
        Routing { top: 4, groups: grouped(GroupScore::Max), renormalise: false, scale: 16.0, ..PLAIN },
        Routing {
            top: 4,
            scoring: Scoring::Sigmoid,
            scale: 2.5,
            groups: grouped(GroupScore::TopTwoSum),
            ..PLAIN
        },
    ];
    for routing in routings {
        // More than 256 experts stay in shared memory.
        for (tokens, experts) in [(1, 8), (7, 64), (6, 160), (5, 320)] {
            for biased in [false, true] {
                let logits = logits(experts as u64, tokens, experts);
                let bias: Vec<f32> = (0..experts).map(|e| 0.3 * ((e * 13) % 7) as f32).collect();
                let bias = biased.then_some(&bias[..]);
                let exact = route_oracle(&logits, experts, &routing, bias);
                let (ids, weights) = routed(lab, &logits, experts, &routing, bias)?;
                let want: Vec<u32> = exact.iter().flatten().map(|(expert, _)| *expert as u32).collect();
                let what = format!("{routing:?}, {experts} experts, bias {biased}");
                lab.same(&format!("experts of {what}"), &ids, &want)?;
                let want: Vec<f64> = exact.iter().flatten().map(|(_, weight)| *weight).collect();
                lab.close(&format!("weights of {what}"), &weights, &want, |i| want[i].abs() * 4e-6 + 1e-30)?;
                // A token alone chooses as in company.
                let last = logits.len() - experts;
                let (alone, _) = routed(lab, &logits[last..], experts, &routing, bias)?;
                lab.same("a token alone", &alone, &ids[ids.len() - routing.top..])?;
            }
        }
        lab.clear();
    }
    // Equal scores: the lower group, the lower expert.
    let ties = Routing { top: 5, groups: grouped(GroupScore::TopTwoSum), ..PLAIN };
    let (ids, _) = routed(lab, &[1.0; 16], 16, &ties, None)?;
    lab.same("experts of equal scores", &ids, &[0, 1, 2, 3, 4])?;
    // What is no number is chosen last, and nothing out of range ever is.
    let mut odd = vec![f32::NAN; 8];
    (odd[5], odd[2]) = (0.5, f32::NEG_INFINITY);
    let (ids, _) = routed(lab, &odd, 8, &PLAIN, None)?;
    lab.same("experts of a row with NaN", &ids, &[5, 0, 1])
}

fn routed(
    lab: &mut Lab<'_>,
    logits: &[f32],
    experts: usize,
    routing: &Routing,
    bias: Option<&[f32]>,
) -> Result<(Vec<u32>, Vec<f32>), String> {
    let slots = logits.len() / experts * routing.top;
    let (ids, weights) = (lab.poisoned(slots)?, lab.poisoned(slots)?);
    let logits = lab.upload(logits)?;
    let bias = bias.map(|bias| lab.upload(bias)).transpose()?;
    lab.launch(route(logits, experts, routing, bias, None, (ids, weights)))?;
    Ok((lab.download(ids)?, lab.download(weights)?))
}

/// `tokens * top` choices: even, all of one expert, and with experts that nobody chose.
pub(super) fn choices(kind: usize, slots: usize, experts: usize) -> Vec<u32> {
    let id = |slot: usize| match kind {
        0 => (slot * 7 + slot / 5) % experts,
        1 => experts - 1,
        _ => slot * slot % experts / 2 * 2,
    };
    (0..slots).map(|slot| id(slot) as u32).collect()
}

/// What grouping leaves on the device.
pub(super) fn grouped(
    lab: &mut Lab<'_>,
    ids: &[u32],
    experts: usize,
    block_rows: usize,
) -> Result<GroupedSlots, String> {
    let to = empty_groups(lab, ids.len(), experts, block_rows)?;
    let ids = lab.upload(ids)?;
    lab.launch(group(ids, experts, &to))?;
    Ok(to)
}

fn empty_groups(
    lab: &mut Lab<'_>,
    slots: usize,
    experts: usize,
    block_rows: usize,
) -> Result<GroupedSlots, String> {
    Ok(GroupedSlots {
        places: lab.poisoned(slots)?,
        slots_at: lab.poisoned(slots)?,
        items: lab.poisoned(GroupedSlots::item_words(slots, experts, block_rows))?,
        item_count: lab.poisoned(1)?,
        block_rows,
    })
}

fn groups(lab: &mut Lab<'_>) -> Result<(), String> {
    // From 2,048 slots on blocks are larger.
    for (slots, experts, block_rows) in [(1, 1, 16), (6, 4, 16), (300, 9, 16), (700, 40, 64), (5000, 12, 64)]
    {
        for kind in 0..3 {
            let ids = choices(kind, slots, experts);
            let mut exact = Grouping::default();
            exact.group(&ids, experts);
            let found = grouped(lab, &ids, experts, block_rows)?;
            let what = format!("{slots} slots, {experts} experts, kind {kind}");
            let (places, slots_at) = (lab.download(found.places)?, lab.download(found.slots_at)?);
            lab.same(&format!("places of {what}"), &places, &exact.places)?;
            lab.same(&format!("slots of {what}"), &slots_at, &exact.slots)?;
            let mut items = Vec::new();
            for expert in 0..experts {
                let (first, end) = (exact.offsets[expert], exact.offsets[expert + 1]);
                for from in (first..end).step_by(block_rows) {
                    items.extend([expert, from, end.min(from + block_rows), 0].map(|word| word as u32));
                }
            }
            let count = lab.download(found.item_count)?;
            lab.same(&format!("items of {what}"), &count, &[items.len() as u32 / 4])?;
            let written = lab.download(found.items)?;
            lab.same(&format!("items of {what}"), &written[..items.len()], &items)?;
            lab.clear();
        }
    }
    Ok(())
}

/// The sum over a token's slots. The first two terms are large and cancel, so that another order shows.
fn sums(lab: &mut Lab<'_>) -> Result<(), String> {
    for (tokens, top, width) in [(1, 1, 8), (9, 5, 1032), (3, 8, 64)] {
        let ids = choices(0, tokens * top, 7);
        let mut grouping = Grouping::default();
        grouping.group(&ids, 7);
        let (mut rows, weights) = (values(8, ids.len() * width), wide(&values(9, ids.len())));
        let mut weights: Vec<f32> = weights.iter().map(|w| w.abs().min(1.0) + 0.1).collect();
        for token in 0..if top > 2 { tokens } else { 0 } {
            for (choice, value) in [(0, 3e4), (1, -3e4)] {
                let slot = token * top + choice;
                weights[slot] = 1.0;
                rows[grouping.places[slot] as usize * width..][..width].fill(bf16::from_f32(value));
            }
        }
        let exact = combine_oracle(&wide(&rows), &grouping.places, &weights, top, width);
        let magnitudes: Vec<f32> = wide(&rows).iter().map(|v| v.abs()).collect();
        let bound = combine_oracle(&magnitudes, &grouping.places, &weights, top, width);
        let in_order = in_slot_order(&wide(&rows), &grouping.places, &weights, top, width);
        let (rows, out) = (lab.upload(&rows)?, lab.poisoned(tokens * width)?);
        let (places, weights) = (lab.upload(&grouping.places)?, lab.upload(&weights)?);
        lab.launch(combine(rows, places, weights, top, None, out))?;
        let out = lab.download(out)?;
        lab.close("sums of experts", &out, &exact, |i| exact[i].abs() * BF16 + bound[i] * 1e-6 + 1e-30)?;
        let rounded: Vec<bf16> = in_order.iter().copied().map(bf16::from_f32).collect();
        lab.same("sums in slot order", &out, &rounded)?;
        // Behind the chosen experts one that serves every token.
        let shared = values(10, tokens * width);
        let with_shared: Vec<bf16> =
            in_order.iter().zip(wide(&shared)).map(|(sum, own)| bf16::from_f32(sum + own)).collect();
        let (shared, out) = (lab.upload(&shared)?, lab.poisoned(tokens * width)?);
        lab.launch(combine(rows, places, weights, top, Some(shared), out))?;
        let out = lab.download(out)?;
        lab.same("sums with a shared expert", &out, &with_shared)?;
    }
    Ok(())
}

/// Few tokens, whose choice and grouping are one launch: what two launches and the sum of the router's splits
/// leave.
fn few(lab: &mut Lab<'_>) -> Result<(), String> {
    let grouped_by_two = Some(Groups { count: 4, keep: 2, by: GroupScore::TopTwoSum });
    let routings = [
        PLAIN,
        Routing { top: 4, scoring: Scoring::SoftmaxTop, renormalise: false, ..PLAIN },
        Routing { top: 4, scoring: Scoring::Sigmoid, scale: 2.5, groups: grouped_by_two, ..PLAIN },
    ];
    for (routing, biased) in routings.into_iter().zip([false, true, true]) {
        for (tokens, experts, splits, rows) in [
            (1, 128, 3, 16),
            (32, 64, 1, 16),
            (5, 8, 2, 64),
            (31, 12, 1, 16),
            (2, 200, 5, 16),
            (3, 320, 2, 16),
        ] {
            let what = format!("{routing:?}, {tokens} tokens of {experts} experts");
            if !are_few(tokens, experts) {
                return Err(format!("{what}: too many"));
            }
            let parts: Vec<f32> = (0..splits as u64).flat_map(|s| logits(s + 3, tokens, experts)).collect();
            let router_bias = values(33, experts);
            let bias: Vec<f32> = (0..experts).map(|e| 0.3 * ((e * 13) % 7) as f32).collect();
            let sum = |i: usize| {
                let total = parts.chunks(tokens * experts).fold(0.0, |total, part| total + part[i]);
                if biased { total + router_bias[i % experts].to_f32() } else { total }
            };
            let whole: Vec<f32> = (0..tokens * experts).map(sum).collect();
            // The last one fills up.
            let kv_slots: Vec<u32> = (0..tokens as u32).map(|t| if t == 4 { NO_SLOT } else { t }).collect();
            let bias = if biased { Some(lab.upload(&bias)?) } else { None };
            let router_bias = if biased { Some(lab.upload(&router_bias)?) } else { None };
            let (whole, parts, kv_slots) =
                (lab.upload(&whole)?, lab.upload(&parts)?, Some(lab.upload(&kv_slots)?));
            let slots = tokens * routing.top;
            let (ids, weights) = (lab.poisoned(slots)?, lab.poisoned(slots)?);
            lab.launch(route(whole, experts, &routing, bias, kv_slots, (ids, weights)))?;
            let ids = lab.download(ids)?;
            let expected = grouped(lab, &ids, experts, rows)?;
            let (own, own_weights) = (empty_groups(lab, slots, experts, rows)?, lab.poisoned(slots)?);
            let sums = RouterSums { sums: parts, splits, bias: router_bias };
            lab.launch(choose(&sums, experts, &routing, bias, kv_slots, own_weights, &own))?;
            let (found, exact) = (lab.download(own_weights)?, lab.download(weights)?);
            lab.same(&format!("weights of {what}"), &found, &exact)?;
            let count = lab.download(expected.item_count)?;
            let (found, exact) = (lab.download(own.items)?, lab.download(expected.items)?);
            let used = count[0] as usize * 4;
            lab.same(&format!("items of {what}"), &found[..used], &exact[..used])?;
            let found = lab.download(own.item_count)?;
            lab.same(&format!("count of {what}"), &found, &count)?;
            let found = lab.download(own.places)?;
            let places = lab.download(expected.places)?;
            lab.same(&format!("places of {what}"), &found, &places)?;
            let taken = places.iter().filter(|place| **place != u32::MAX).count();
            let (found, exact) = (lab.download(own.slots_at)?, lab.download(expected.slots_at)?);
            lab.same(&format!("slots of {what}"), &found[..taken], &exact[..taken])?;
            lab.clear();
        }
    }
    Ok(())
}

/// Tokens that only fill up a batch choose nobody: no item of work is theirs, their sum is 0, and the others
/// have the bits that they have alone.
fn fillers(lab: &mut Lab<'_>) -> Result<(), String> {
    let (experts, top, width) = (9, PLAIN.top, 64);
    let kv_slots = [5, NO_SLOT, 0, NO_SLOT, NO_SLOT, 7];
    let own: Vec<usize> = (0..kv_slots.len()).filter(|token| kv_slots[*token] != NO_SLOT).collect();
    let mut logits = logits(21, kv_slots.len(), experts);
    let alone: Vec<f32> = own.iter().flat_map(|t| logits[t * experts..][..experts].to_vec()).collect();
    // What is in a row that fills up is nobody's business.
    logits[experts..2 * experts].fill(f32::NAN);
    let slots = kv_slots.len() * top;
    let (ids, weights) = (lab.poisoned(slots)?, lab.poisoned(slots)?);
    let (logits, kv_slots_there) = (lab.upload(&logits)?, lab.upload(&kv_slots)?);
    lab.launch(route(logits, experts, &PLAIN, None, Some(kv_slots_there), (ids, weights)))?;
    let (chosen, weights_of) = (lab.download(ids)?, lab.download(weights)?);
    let (exact, exact_weights) = routed(lab, &alone, experts, &PLAIN, None)?;
    let of_own =
        |all: &[u32]| -> Vec<u32> { own.iter().flat_map(|t| all[t * top..][..top].to_vec()).collect() };
    lab.same("experts beside fillers", &of_own(&chosen), &exact)?;
    let bits: Vec<u32> = weights_of.iter().map(|w| w.to_bits()).collect();
    let exact_bits: Vec<u32> = exact_weights.iter().map(|w| w.to_bits()).collect();
    lab.same("weights beside fillers", &of_own(&bits), &exact_bits)?;
    lab.same("a filler's experts", &chosen[top..2 * top], &[experts as u32; PLAIN.top])?;
    let to = grouped(lab, &chosen, experts, 16)?;
    let mut exact_grouping = Grouping::default();
    exact_grouping.group(&exact, experts);
    let places = lab.download(to.places)?;
    lab.same("places beside fillers", &of_own(&places), &exact_grouping.places)?;
    lab.same("a filler's places", &places[top..2 * top], &[u32::MAX; PLAIN.top])?;
    let busy = exact_grouping.offsets.windows(2).filter(|ends| ends[0] < ends[1]).count();
    let count = lab.download(to.item_count)?;
    lab.same("items beside fillers", &count, &[busy as u32])?;
    let rows = values(22, slots * width);
    let sums = in_slot_order(&wide(&rows), &exact_grouping.places, &exact_weights, top, width);
    let (rows, out) = (lab.upload(&rows)?, lab.poisoned(kv_slots.len() * width)?);
    lab.launch(combine(rows, to.places, weights, top, None, out))?;
    let out = lab.download(out)?;
    for (i, token) in own.iter().enumerate() {
        let exact: Vec<bf16> = sums[i * width..][..width].iter().copied().map(bf16::from_f32).collect();
        lab.same("a sum beside fillers", &out[token * width..][..width], &exact)?;
    }
    lab.same("a filler's sum", &out[width..2 * width], &vec![bf16::ZERO; width])
}

/// The sums as they are to be made: in f32, each product and addition rounded once, a token's slots in order.
fn in_slot_order(rows: &[f32], places: &[u32], weights: &[f32], top: usize, width: usize) -> Vec<f32> {
    let mut sums = vec![0.0f32; places.len() / top * width];
    for (slot, (place, weight)) in places.iter().zip(weights).enumerate() {
        let row = &rows[*place as usize * width..][..width];
        for (sum, value) in sums[slot / top * width..][..width].iter_mut().zip(row) {
            *sum = weight.mul_add(*value, *sum);
        }
    }
    sums
}
