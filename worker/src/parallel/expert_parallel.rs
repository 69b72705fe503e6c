//! Processes that share a model's experts: this one is rank 0 and starts the others, each the same program
//! again, over memory that all of them map. Watches them and ends them; what they say to each other is
//! `model/experts.rs`' business.
//!
//! Neither side outlives the other. A rank ends when its standard input does, which this process holds; that
//! a rank has ended shows at the end of its standard output, and is an alarm in the group's memory, so that
//! no rank waits for it.

mod error;
#[cfg(target_os = "linux")]
mod hosts;
#[cfg(all(target_os = "linux", feature = "cuda"))]
mod synthetic;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::device::DeviceChoice;
use crate::model::{ModelSource, Quantize};

/// What a rank is told when it is started.
#[derive(Debug, Clone)]
pub struct RankOptions {
    /// Its number in the group, from 1 on: rank 0 is the worker itself.
    pub rank: usize,
    /// Where its group is found.
    pub group: RankGroup,
    /// The model whose experts it holds, which must be rank 0's.
    pub model: ModelSource,
    /// How matrices are quantised, which must be as rank 0 does it.
    pub quantize: Quantize,
    /// The same, where it runs attention: whether its KV cache is in FP8.
    pub fp8_kv: bool,
    /// Where its experts are: the processor, or the GPU of a number.
    pub device: DeviceChoice,
    /// Tokens of a step, at most: on a GPU a part of what all ranks agree on.
    pub max_batched_tokens: usize,
    /// Sequences of a step, at most.
    pub max_running: usize,
    /// Processor threads that compute.
    pub threads: usize,
    /// How long another rank may take for its part of an exchange.
    pub deadline: Duration,
}

/// Where a rank finds its group.
#[derive(Debug, Clone)]
pub enum RankGroup {
    /// In memory that can be opened here; rank 0 has started this process.
    Memory(PathBuf),
    /// At the addresses of all ranks, this one's among them.
    Hosts(Vec<SocketAddr>),
}

pub use error::{ListenError, RankExit};
#[cfg(target_os = "linux")]
pub(crate) use hosts::Hosts;
#[cfg(target_os = "linux")]
pub use linux::run_rank;
#[cfg(target_os = "linux")]
pub(crate) use linux::{Devices, Processes, Ranks};
#[cfg(all(target_os = "linux", feature = "cuda"))]
pub(crate) use linux::{OPEN_MAILBOXES, serve_on_gpu};
#[cfg(all(target_os = "linux", feature = "cuda"))]
pub use synthetic::{run_synthetic_rank, synthetic_on_gpus};

/// Shared memory and its alarm are Linux'.
#[cfg(target_os = "linux")]
mod linux {
    use std::fs::OpenOptions;
    use std::io::{self, Read as _};
    use std::num::NonZeroUsize;
    use std::os::fd::{AsRawFd as _, OwnedFd};
    use std::os::unix::process::CommandExt as _;
    use std::path::Path;
    use std::process::{Child, Command, Stdio};
    use std::thread;

    use keyway_kernels::compute::Compute;
    #[cfg(feature = "cuda")]
    use keyway_kernels::cuda::gpu::{Gpu, ipc};
    use keyway_kernels::fabric::{Alarm, Fabric, Shm};
    use tokio::signal::unix::{SignalKind, signal};

    use super::{DeviceChoice, ModelSource, Quantize, RankExit, RankGroup, RankOptions, hosts};
    use crate::model::ExpertParallelOptions;
    #[cfg(feature = "cuda")]
    use crate::model::{CudaRank, LoadedModel, OpenMailboxes, RankSettings, Store, WholeModel};
    use crate::model::{ExpertRank, NoRanks, RankError, Supervisor};

    /// Mailboxes of processes, each with a GPU or with a part of one.
    #[cfg(feature = "cuda")]
    pub(crate) const OPEN_MAILBOXES: OpenMailboxes<Gpu> =
        |gpu, layout, fabric, deadline| ipc::mailboxes(gpu, layout, fabric, deadline);

    /// Words of a placement beside its masks, or of a mailbox's handle, generously.
    #[cfg(feature = "cuda")]
    const GPU_NOTE_WORDS: usize = 64;

    /// Which device each rank computes on.
    #[derive(Debug, Clone, Copy)]
    pub(crate) enum Devices {
        Cpu,
        /// On GPUs in turn, of which there are so many; rank 0 on `first`.
        #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "of builds that have GPUs"))]
        Gpus {
            first: usize,
            count: usize,
        },
    }

    impl Devices {
        fn of(self, rank: usize) -> DeviceChoice {
            match self {
                Self::Cpu => DeviceChoice::Cpu,
                Self::Gpus { first, count } => DeviceChoice::Cuda((first + rank) % count.max(1)),
            }
        }
    }

    /// What all ranks are started with.
    #[derive(Debug, Clone)]
    pub(crate) struct Ranks {
        pub(crate) options: ExpertParallelOptions,
        pub(crate) model: ModelSource,
        pub(crate) quantize: Quantize,
        /// Whether KV caches are in FP8.
        pub(crate) fp8_kv: bool,
        /// Which device each of them, rank 0 among them, computes on.
        pub(crate) devices: Devices,
        /// Tokens and sequences of a step, at most.
        pub(crate) most: [usize; 2],
        /// Processor threads that compute in each process; 1 where GPUs do.
        pub(crate) threads: usize,
        /// Words of the longest message.
        pub(crate) capacity: usize,
    }

    impl Ranks {
        /// With a GPU each, or a part of one, whose fabric takes notes of `words` words: tokens do not go
        /// through it.
        #[cfg(feature = "cuda")]
        pub(crate) fn on_gpus(
            options: &ExpertParallelOptions,
            model: ModelSource,
            quantize: Quantize,
            fp8_kv: bool,
            most: [usize; 2],
            words: usize,
            [first, count]: [usize; 2],
        ) -> Self {
            let size = options.size;
            if size > count {
                tracing::info!(
                    "{size} expert-parallel ranks on {count} GPU(s): some share one, and take turns"
                );
            }
            Self {
                options: options.clone(),
                model,
                quantize,
                fp8_kv,
                devices: Devices::Gpus { first, count },
                most,
                threads: 1,
                capacity: GPU_NOTE_WORDS + words + 2 * size,
            }
        }
    }

    /// The ranks beside this process.
    #[derive(Debug)]
    pub(crate) struct Processes {
        ranks: Ranks,
        /// Open as long as a rank may open it.
        memory: Option<OwnedFd>,
        children: Vec<Child>,
    }

    impl Processes {
        pub(crate) fn new(ranks: Ranks) -> Self {
            Self { ranks, memory: None, children: Vec::new() }
        }

        /// They hold nothing that would have to be put away.
        fn end(&mut self) {
            for child in &mut self.children {
                // One that has ended already cannot be killed.
                let _ = child.kill();
            }
            for mut child in self.children.drain(..) {
                let _ = child.wait();
            }
            self.memory = None;
        }

        fn spawn(&self, rank: usize, memory: &OwnedFd, alarm: Alarm) -> io::Result<Child> {
            let Ranks { options, model, quantize, fp8_kv, devices, most: [tokens, running], threads, .. } =
                &self.ranks;
            let (program, first) = options
                .rank_command
                .split_first()
                .ok_or_else(|| io::Error::other("there is no program to be a rank"))?;
            let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
            let mut child = Command::new(program)
                .args(first)
                .args(["--rank", &rank.to_string(), "--memory", &path])
                .args(["--model", &model.to_string(), "--quantize", quantize.option()])
                .args(["--kv-cache-dtype", if *fp8_kv { "fp8" } else { "auto" }])
                .args(["--device", &devices.of(rank).to_string()])
                .args(["--max-batched-tokens", &tokens.to_string(), "--max-running", &running.to_string()])
                .args(["--threads", &threads.to_string()])
                .args(["--deadline", &options.deadline.as_secs_f64().to_string()])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                // A terminal's interrupt is for rank 0, which drains first.
                .process_group(0)
                .spawn()?;
            let mut stdout = child.stdout.take().ok_or_else(|| io::Error::other("a rank without output"))?;
            let watch = move || {
                // Nothing is written there: it ends with the process.
                let _ = stdout.read(&mut [0]);
                alarm.rank_is_gone(rank);
            };
            if let Err(error) = thread::Builder::new().name(format!("keyway-rank-{rank}")).spawn(watch) {
                let _ = child.kill();
                let _ = child.wait();
                return Err(error);
            }
            Ok(child)
        }

        fn start_all(&mut self) -> io::Result<Shm> {
            let Ranks { options, capacity, .. } = &self.ranks;
            let memory = Shm::create(options.size, *capacity)?;
            let fabric = Shm::attach(&memory, 0)?;
            for rank in 1..self.ranks.options.size {
                let child = self.spawn(rank, &memory, fabric.alarm())?;
                tracing::info!(rank, pid = child.id(), "expert-parallel rank started");
                self.children.push(child);
            }
            self.memory = Some(memory);
            Ok(fabric)
        }
    }

    impl Supervisor for Processes {
        fn start(&mut self) -> Result<Box<dyn Fabric>, NoRanks> {
            self.end();
            match self.start_all() {
                Ok(fabric) => Ok(Box::new(fabric)),
                Err(error) => {
                    self.end();
                    Err(error.into())
                }
            }
        }
    }

    impl Drop for Processes {
        fn drop(&mut self) {
            self.end();
        }
    }

    /// Is a rank: of a group in memory until it fails or rank 0 ends, of one over hosts for good. The error
    /// says why it ended.
    pub fn run_rank(options: &RankOptions) -> Result<(), RankExit> {
        let RankOptions { rank, group, model, quantize, device, threads, deadline, .. } = options;
        let compute = Compute::new(NonZeroUsize::new(*threads).unwrap_or(NonZeroUsize::MIN));
        let open = || ExpertRank::open(model, *quantize).map_err(RankError::Model);
        let memory = match (group, device) {
            (RankGroup::Memory(memory), _) => memory,
            (RankGroup::Hosts(addrs), DeviceChoice::Cpu) => {
                return hosts::serve(*rank, addrs, &mut open()?, &compute, *deadline);
            }
            (RankGroup::Hosts(_), _) => return Err(RankExit::HostsOnGpu),
        };
        let ended = match *device {
            DeviceChoice::Cuda(number) => on_gpu(options, number, memory),
            DeviceChoice::Cpu | DeviceChoice::Auto => {
                let mut experts = open()?;
                let fabric = join(*rank, memory)?;
                experts.serve(fabric, &compute, *deadline).map_err(RankExit::Rank)
            }
        };
        ended.map_err(|source| RankExit::Ended { rank: *rank, source: Box::new(source) })
    }

    /// Serves on the GPU of this number.
    #[cfg(feature = "cuda")]
    fn on_gpu(options: &RankOptions, number: usize, memory: &Path) -> Result<(), RankExit> {
        // The device quantises what is stored.
        let store = Store::open(&options.model, Quantize::None).map_err(RankError::Model)?;
        let whole = |ranks, rank| LoadedModel::load_rank(&options.model, ranks, rank);
        serve_on_gpu(options, number, memory, (store, &whole))
    }

    /// Serves on the GPU of this number with experts from `store`, or the whole model's share.
    #[cfg(feature = "cuda")]
    pub(crate) fn serve_on_gpu(
        options: &RankOptions,
        number: usize,
        memory: &Path,
        (store, whole): (Store, WholeModel<'_>),
    ) -> Result<(), RankExit> {
        let RankOptions { rank, quantize, fp8_kv, deadline, max_batched_tokens, max_running, .. } = *options;
        let gpu = Gpu::new(number)?;
        let fabric = join(rank, memory)?;
        let (tokens_max, sequences_max) = (max_batched_tokens, max_running);
        let by = RankSettings { deadline, tokens_max, sequences_max, fp8_kv, whole };
        Ok(CudaRank::serve(gpu, (store, quantize), fabric, OPEN_MAILBOXES, &by)?)
    }

    #[cfg(not(feature = "cuda"))]
    fn on_gpu(_: &RankOptions, _: usize, _: &Path) -> Result<(), RankExit> {
        Err(RankExit::NoCuda)
    }

    /// This rank's end of the group, whose processes end together: none without rank 0, and none before it.
    fn join(rank: usize, memory: &Path) -> Result<Box<dyn Fabric>, RankExit> {
        // A service manager ends all processes at once: rank 0 drains, and this one is needed as long.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
        let runtime = runtime.map_err(RankExit::Runtime)?;
        let _guard = runtime.enter();
        // Ignored from here on, whatever becomes of the runtime.
        let _ = signal(SignalKind::terminate()).map_err(RankExit::Signals)?;
        let parent = thread::Builder::new().name("keyway-parent".to_owned()).spawn(|| {
            // Nothing is written there: it ends with rank 0.
            let _ = io::stdin().read(&mut [0]);
            std::process::exit(0);
        });
        parent.map_err(RankExit::Parent)?;
        let file = OpenOptions::new().read(true).write(true).open(memory);
        let attached = file.and_then(|file| Shm::attach(&file, rank));
        match attached {
            Ok(fabric) => Ok(Box::new(fabric)),
            Err(source) => Err(RankExit::Join { memory: memory.to_owned(), source }),
        }
    }
}
