//! Ranks that are processes, each with a GPU, or with a part of one: what `keyway-worker --device cuda
//! --expert-parallel-size N` starts, without its server and with random weights. Every logit's bits are those
//! of one process; a rank that is killed is named, and after it the same bits come again.

use std::process::Command;
use std::time::Duration;

use clap::Parser as _;
use keyway_kernels::cuda::gpu::Gpu;
use keyway_worker::backend::Backend;
use keyway_worker::cli::{Cli, Task};
use keyway_worker::model::{CudaBackend, KvLayout, LoadedModel, Quantize};
use keyway_worker::{ExpertParallelOptions, run_synthetic_rank, synthetic_on_gpus};
use serde_json::{Value, json};

use crate::cases::{generate, text};
use crate::driver::Driver;
use crate::models::{MODELS, VOCAB, Variant};

pub(crate) const NAME: &str = "backend_processes";

const LAYOUT: KvLayout = KvLayout { block_size: 16, num_blocks: 251 };
/// Tokens of a step, some of which take more than one round.
const STEP_TOKENS: usize = 64;
/// Before a rank is missed: longer than processes take turns on one GPU.
const DEADLINE: Duration = Duration::from_secs(4);
/// A family and how many ranks share its experts; one is killed in the last of them.
const GROUPS: [(&str, usize); 3] =
    [("MixtralForCausalLM", 2), ("GptOssForCausalLM", 2), ("DeepseekV3ForCausalLM", 4)];

fn variant(name: &str) -> Result<&'static Variant, String> {
    MODELS.iter().find(|variant| variant.name == name).ok_or_else(|| format!("no family {name}"))
}

/// Compares each group's logits, bit for bit, with those of one process, and once more after a rank was
/// killed.
pub(crate) fn run() -> Result<Value, String> {
    let mut compared = 0;
    for (i, (name, ranks)) in GROUPS.into_iter().enumerate() {
        let config = variant(name)?.config();
        let alone = LoadedModel::synthetic(&config).map_err(text)?;
        let alone = alone.onto(Gpu::new(0).map_err(text)?, Quantize::None).map_err(text)?;
        let expected = said(&mut Driver::new(alone.into_backend(LAYOUT).map_err(text)?, 1))?;
        let program = std::env::current_exe().map_err(text)?;
        let options = ExpertParallelOptions {
            size: ranks,
            deadline: DEADLINE,
            rank_command: vec![program.into(), "rank".into(), name.into()],
            ..ExpertParallelOptions::default()
        };
        let shared = synthetic_on_gpus(&config, &options, (STEP_TOKENS, LAYOUT));
        let mut shared = Driver::new(shared.map_err(|e| format!("{name}: {e}"))?, 1);
        compared += same(&said(&mut shared)?, &expected).map_err(|fault| format!("{name}: {fault}"))?;
        if i + 1 == GROUPS.len() {
            kill_one(&mut shared).map_err(|fault| format!("{name}, a rank killed: {fault}"))?;
            compared += same(&said(&mut shared)?, &expected)
                .map_err(|fault| format!("{name}, after a rank was killed: {fault}"))?;
        }
    }
    Ok(json!({ "case": NAME, "compared": compared, "worst": 0.0 }))
}

/// One of the ranks.
pub(crate) fn rank(family: &str, options: &[&str]) -> Result<Value, String> {
    let arguments = ["keyway-worker", "expert-rank"].iter().chain(options);
    match Cli::try_parse_from(arguments).map_err(text)?.into_task() {
        Task::ExpertRank(options, _) => {
            run_synthetic_rank(&variant(family)?.config(), &options).map_err(text)?;
        }
        _ => return Err("these are no options of a rank".to_owned()),
    }
    Ok(json!({ "rank": "ended" }))
}

/// Logits behind prompts that run side by side in pieces, and behind the tokens that follow; ends what they
/// had in the cache.
fn said(driver: &mut Driver<CudaBackend<Gpu>>) -> Result<Vec<f32>, String> {
    let prompts: Vec<Vec<u32>> =
        [(90, 7), (41, 11), (16, 17)].map(|(len, step)| (0..len).map(|i| i * step % VOCAB).collect()).into();
    Ok(generate(driver, &prompts, 20)?.concat().concat())
}

fn same(found: &[f32], expected: &[f32]) -> Result<usize, String> {
    let differs = found.iter().zip(expected).position(|(a, b)| a.to_bits() != b.to_bits() || a.is_nan());
    match differs {
        Some(at) => Err(format!("logit {at} is {:e} instead of {:e}", found[at], expected[at])),
        None if found.len() != expected.len() => Err(format!("{} logits", found.len())),
        None => Ok(found.len()),
    }
}

/// Kills a rank: the next step must name it, and say that what is cached is lost.
fn kill_one(driver: &mut Driver<CudaBackend<Gpu>>) -> Result<(), String> {
    let killed = *children()?.first().ok_or("there are no ranks")?;
    let done = Command::new("kill").args(["-KILL", &killed.to_string()]).status().map_err(text)?;
    if !done.success() {
        return Err(format!("kill {killed}: {done}"));
    }
    match said(driver) {
        Ok(_) => return Err("nobody missed it".to_owned()),
        Err(reason) if reason.contains("expert-parallel rank 1 failed") => {}
        Err(reason) => return Err(format!("the wrong reason: {reason}")),
    }
    if driver.backend.cache_was_lost() { Ok(()) } else { Err("nothing was lost".to_owned()) }
}

/// The processes that this one started, in the order of their start.
fn children() -> Result<Vec<u32>, String> {
    let own = std::process::id();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").map_err(text)?.flatten() {
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // Behind the name, which may be anything: state, parent.
        let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        if parent == Some(own) {
            found.push(number);
        }
    }
    found.sort_unstable();
    Ok(found)
}
