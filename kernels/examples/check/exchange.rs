//! What the exchange between ranks takes each way: eight ranks that share the GPU, 128 tokens in all of the
//! largest models' width, each to eight of 128 experts. Without the experts: what they would have made lies
//! there. The bytes are each token read once and each row written where the experts read it, and the other
//! way round.

use std::sync::Arc;
use std::time::Duration;

use half::bf16;
use keyway_kernels::cuda::gpu::Gpu;
use keyway_kernels::cuda::peer::{Arrivals, Layout, Mailboxes, Peers, RoundTokens};
use keyway_kernels::cuda::{Device, DeviceError, Launch, Slice};
use keyway_kernels::moe::Placement;

use crate::cases::{values, wide};
use crate::timings::{REPEATS, line};

pub(crate) const NAMES: &[&str] = &["peer_dispatch_128x7168", "peer_combine_128x7168"];

const LAYOUT: Layout = Layout { ranks: 8, held: 16, tokens: 16, top: 8, width: 7168 };
const EXPERTS: usize = LAYOUT.ranks * LAYOUT.held;

/// The median of replays of one way, the other way going untimed in between, as a line of JSON.
pub(crate) fn run(name: &str) -> Result<String, String> {
    let mut gpu = Gpu::new(0).map_err(|e| e.to_string())?;
    let times = time(&mut gpu, name.starts_with("peer_dispatch")).map_err(|e| e.to_string())?;
    let row = (LAYOUT.width * 2) as u64;
    let tokens = (LAYOUT.ranks * LAYOUT.tokens) as u64;
    Ok(line(name, times, tokens * row * (1 + LAYOUT.top as u64), 0))
}

fn time(gpu: &mut Gpu, is_dispatch: bool) -> Result<Vec<f32>, DeviceError> {
    let device: &mut dyn Device = gpu;
    let mailboxes = Arc::new(Mailboxes::in_one(device, LAYOUT)?);
    let placement = Placement::even(EXPERTS, LAYOUT.ranks);
    let peers = Peers::new(device, &mailboxes, 0, LAYOUT.ranks, &placement, Duration::from_secs(1))?;
    let tokens = tokens(device)?;
    let elements = LAYOUT.ranks * LAYOUT.rows() * LAYOUT.width;
    let block_rows = 16;
    let arrivals = Arrivals {
        rows: device.slice(elements)?,
        items: device.slice(LAYOUT.ranks * peers.items_max(block_rows) * 4)?,
        item_counts: device.slice(LAYOUT.ranks)?,
        most: LAYOUT.rows(),
        block_rows,
    };
    let outputs = device.upload(&values(3, elements))?;
    let out: Slice<bf16> = device.slice(tokens.x.len)?;
    let mut dispatch: Vec<Launch> = peers.dispatch_send(&tokens).into();
    dispatch.push(peers.dispatch_receive(&arrivals));
    let combine = [peers.combine_send(outputs), peers.combine_receive(&tokens, None, out)];
    let times = if is_dispatch {
        // So that a way back can be the first.
        dispatch.iter().try_for_each(|launch| gpu.launch(launch))?;
        gpu.time_after(&combine, &dispatch, REPEATS)?
    } else {
        gpu.time_after(&dispatch, &combine, REPEATS)?
    };
    match peers.fault(gpu)? {
        Some(fault) => Err(DeviceError(fault.to_string())),
        None => Ok(times),
    }
}

/// Random tokens, each with different experts.
fn tokens(device: &mut dyn Device) -> Result<RoundTokens, DeviceError> {
    let mut state = 7_u64;
    let mut below = |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    let mut ids = Vec::new();
    for _ in 0..LAYOUT.ranks * LAYOUT.tokens {
        let mut experts: Vec<u32> = (0..EXPERTS as u32).collect();
        ids.extend((0..LAYOUT.top).map(|_| experts.swap_remove(below(experts.len()))));
    }
    Ok(RoundTokens {
        counts: device.upload(&[LAYOUT.tokens as u32; LAYOUT.ranks])?,
        x: device.upload(&values(1, LAYOUT.ranks * LAYOUT.tokens * LAYOUT.width))?,
        weights: device.upload(&wide(&values(2, ids.len())))?,
        ids: device.upload(&ids)?,
    })
}
