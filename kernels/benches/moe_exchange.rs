//! What spreading experts over two processes costs: exchanges over shared memory against a copy of as many
//! bytes, and a layer shaped like Qwen3-30B-A3B's (128 experts of 2048 by 768, 8 a token, bf16) with what is
//! not computing in it. One thread a rank; needs two processors, 2.5 GB and Linux: `cargo bench -p
//! keyway-kernels --bench moe_exchange`.

#![allow(clippy::expect_used, reason = "a benchmark ends at whatever fails")]

fn main() {
    #[cfg(target_os = "linux")]
    linux::main();
    #[cfg(not(target_os = "linux"))]
    println!("shared memory between ranks needs Linux");
}

#[cfg(target_os = "linux")]
mod linux {
    use std::fs::OpenOptions;
    use std::hint::black_box;
    use std::io::Read as _;
    use std::num::NonZeroUsize;
    use std::os::fd::AsRawFd as _;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use keyway_kernels::compute::Compute;
    use keyway_kernels::elementwise::silu_mul;
    use keyway_kernels::fabric::{Fabric, Phase, Shm};
    use keyway_kernels::matmul::{self, PackedMatrix, WeightType};
    use keyway_kernels::moe::Placement;
    use keyway_kernels::moe::parallel::{Experts, LayerTokens, Parallel, capacity_for};

    const EXPERTS: usize = 128;
    const TOP: usize = 8;
    const HIDDEN: usize = 2048;
    const INNER: usize = 768;
    const DEADLINE: Duration = Duration::from_secs(60);
    /// Bytes of a message, and how often it is exchanged.
    const MESSAGES: [(usize, usize); 6] = [
        (64, 20_000),
        (8 << 10, 20_000),
        (64 << 10, 5_000),
        (256 << 10, 2_000),
        (1 << 20, 500),
        (8 << 20, 100),
    ];
    /// Tokens of a layer, and how often it runs.
    const LAYERS: [(usize, usize); 4] = [(1, 40), (8, 20), (64, 8), (512, 4)];
    const TOKENS_MAX: usize = 512;

    pub(crate) fn main() {
        let args: Vec<String> = std::env::args().collect();
        match args.iter().position(|arg| arg == "--rank-1") {
            Some(at) => other_rank(&args[at + 1]),
            None => first_rank(),
        }
    }

    fn first_rank() {
        let capacity = capacity_for(TOKENS_MAX, EXPERTS, TOP, HIDDEN).max(MESSAGES[5].0 / 4);
        let memory = Shm::create(2, capacity).expect("shared memory");
        let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
        let program = std::env::current_exe().expect("this program");
        let mut other = Command::new(program)
            .args(["--rank-1", &path])
            .stdout(Stdio::piped())
            .spawn()
            .expect("a second process");
        let mut fabric = Shm::attach(&memory, 0).expect("rank 0");
        println!(
            "exchange of a message each way, both ranks filling theirs by a copy; read where it lies, or copied out"
        );
        println!(
            "{:>10} {:>12} {:>12} {:>7} {:>14} {:>7}",
            "bytes", "floor us", "in place us", "ratio", "copied out us", "ratio"
        );
        for (bytes, rounds) in MESSAGES {
            messages(&mut fabric, bytes, rounds, true);
        }
        layers(&mut fabric, &mut other);
        assert!(other.wait().expect("its end").success());
    }

    fn other_rank(path: &str) {
        let file = OpenOptions::new().read(true).write(true).open(path).expect("the group's memory");
        let mut fabric = Shm::attach(&file, 1).expect("rank 1");
        for (bytes, rounds) in MESSAGES {
            messages(&mut fabric, bytes, rounds, false);
        }
        let mut networks = Networks::new(EXPERTS / 2..EXPERTS, Compute::single());
        let mut parallel = Parallel::default();
        fabric.exchange(Phase::Placement, DEADLINE).expect("an exchange");
        for (_, rounds) in LAYERS {
            for _ in 0..=rounds {
                parallel.serve(&mut fabric, &mut networks, DEADLINE).expect("a layer");
                println!("{}", parallel.times().compute.as_secs_f64());
            }
        }
    }

    /// Seconds of the middle one.
    fn median(mut times: Vec<f64>) -> f64 {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    }

    /// Exchanges of `bytes` each way; on rank 0 with times. The floor is 0.5 us and a copy of the bytes, made
    /// by both ranks at once, from buffers as warm as the messages.
    fn messages(fabric: &mut Shm, bytes: usize, rounds: usize, tells: bool) {
        let (words, to) = (bytes / 4, 1 - fabric.rank());
        let (from, mut copy) = (vec![7_u32; words], vec![0_u32; words]);
        fabric.exchange(Phase::Placement, DEADLINE).expect("an exchange");
        let mut copies = Vec::new();
        for _ in 0..rounds {
            let begin = Instant::now();
            copy.copy_from_slice(black_box(&from));
            black_box(&mut copy);
            copies.push(begin.elapsed().as_secs_f64());
        }
        let mut results = [0.0; 2];
        for (copied_out, result) in [false, true].into_iter().zip(&mut results) {
            let mut times = Vec::new();
            fabric.exchange(Phase::Placement, DEADLINE).expect("an exchange");
            for _ in 0..rounds + rounds / 10 {
                let begin = Instant::now();
                fabric.outbox(to, words).expect("room").copy_from_slice(black_box(&from));
                fabric.exchange(Phase::Dispatch, DEADLINE).expect("an exchange");
                if copied_out {
                    copy.copy_from_slice(fabric.inbox(to));
                    black_box(&mut copy);
                }
                times.push(begin.elapsed().as_secs_f64());
            }
            *result = median(times.split_off(rounds / 10));
        }
        let floor = 0.5e-6 + median(copies);
        if tells {
            let [in_place, copied] = results;
            println!(
                "{bytes:10} {:12.2} {:12.2} {:7.2} {:14.2} {:7.2}",
                floor * 1e6,
                in_place * 1e6,
                in_place / floor,
                copied * 1e6,
                copied / floor
            );
        }
    }

    /// Some experts of the layer, with weights that are not zero.
    struct Networks {
        compute: Compute,
        first: usize,
        held: Vec<(PackedMatrix, PackedMatrix)>,
        gate_up: Vec<f32>,
        gated: Vec<f32>,
    }

    impl Networks {
        fn new(held: std::ops::Range<usize>, compute: Compute) -> Self {
            let mut state = 1_u32;
            let mut fill = |row: &mut [f32]| {
                for value in row {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    *value = f32::from((state >> 16) as i16) * 1e-6;
                }
            };
            let mut matrix =
                |outputs, inputs| PackedMatrix::pack(outputs, inputs, WeightType::Bf16, |_, row| fill(row));
            let first = held.start;
            let held = held.map(|_| (matrix(2 * INNER, HIDDEN), matrix(HIDDEN, INNER))).collect();
            Self { compute, first, held, gate_up: Vec::new(), gated: Vec::new() }
        }
    }

    impl Experts for Networks {
        fn shape(&self, _: u32) -> Option<(usize, usize)> {
            Some((HIDDEN, EXPERTS))
        }

        fn holds(&self, _: u32, expert: usize) -> bool {
            (self.first..self.first + self.held.len()).contains(&expert)
        }

        fn run(&mut self, _: u32, expert: usize, x: &[f32], out: &mut [f32]) {
            let (gate_up, down) = &self.held[expert - self.first];
            let rows = x.len() / HIDDEN;
            self.gate_up.resize(rows * 2 * INNER, 0.0);
            self.gated.resize(rows * INNER, 0.0);
            matmul::cpu(&self.compute, x, gate_up, &mut self.gate_up);
            silu_mul(&self.compute, &self.gate_up, INNER, &mut self.gated);
            matmul::cpu(&self.compute, &self.gated, down, out);
        }
    }

    /// Tokens with eight experts each, no two alike, every expert as likely.
    fn routed(tokens: usize) -> (Vec<f32>, Vec<u32>, Vec<f32>) {
        let mut state = 7_u64;
        let mut next = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let mut ids = Vec::new();
        for _ in 0..tokens {
            let mut of_token: Vec<u32> = Vec::new();
            while of_token.len() < TOP {
                let id = next(EXPERTS) as u32;
                if !of_token.contains(&id) {
                    of_token.push(id);
                }
            }
            ids.extend(of_token);
        }
        let x = (0..tokens * HIDDEN).map(|_| next(2000) as f32 * 1e-3 - 1.0).collect();
        (x, ids, vec![0.125; tokens * TOP])
    }

    /// A layer on two ranks of one thread each, and on one rank of two threads.
    fn layers(fabric: &mut Shm, other: &mut std::process::Child) {
        let mut networks = Networks::new(0..EXPERTS, Compute::single());
        fabric.exchange(Phase::Placement, DEADLINE).expect("an exchange");
        let (spread, whole) = (Placement::even(EXPERTS, 2), Placement::even(EXPERTS, 1));
        let mut parallel = Parallel::default();
        let single = Compute::single();
        let (mut totals, mut computes) = (Vec::new(), Vec::new());
        for (tokens, rounds) in LAYERS {
            let (x, ids, weights) = routed(tokens);
            let mut out = vec![0.0; x.len()];
            for _ in 0..=rounds {
                let tokens = LayerTokens { layer: 0, top: TOP, x: &x, ids: &ids, weights: &weights };
                let begin = Instant::now();
                parallel
                    .run(&single, fabric, &spread, tokens, &mut networks, &mut out, DEADLINE)
                    .expect("a layer");
                totals.push(begin.elapsed().as_secs_f64());
                computes.push(parallel.times().compute.as_secs_f64());
            }
        }
        let mut text = String::new();
        other.stdout.take().expect("its times").read_to_string(&mut text).expect("its times");
        let theirs: Vec<f64> = text.lines().map(|line| line.parse().expect("seconds")).collect();
        networks.compute = Compute::new(NonZeroUsize::new(2).expect("two"));
        println!(
            "\na layer: all of it; the busier rank's products; all else, and its share; one rank, two threads"
        );
        println!(
            "{:>7} {:>10} {:>12} {:>10} {:>7} {:>10}",
            "tokens", "layer ms", "products ms", "else ms", "share", "alone ms"
        );
        let mut first = 0;
        for (tokens, rounds) in LAYERS {
            // The first round of each size is to warm up.
            let range = first + 1..first + 1 + rounds;
            first += 1 + rounds;
            let busier: Vec<f64> = range.clone().map(|i| computes[i].max(theirs[i])).collect();
            let rest = median(range.clone().zip(&busier).map(|(i, busier)| totals[i] - busier).collect());
            let (total, busier) = (median(totals[range].to_vec()), median(busier));
            let alone = alone(&whole, tokens, rounds, &mut networks);
            println!(
                "{tokens:7} {:10.3} {:12.3} {:10.3} {:6.1}% {:10.3}",
                total * 1e3,
                busier * 1e3,
                rest * 1e3,
                rest / total * 100.0,
                alone * 1e3
            );
        }
    }

    fn alone(whole: &Placement, tokens: usize, rounds: usize, networks: &mut Networks) -> f64 {
        let mut fabric = keyway_kernels::fabric::Local::group(1, 0).remove(0);
        let (x, ids, weights) = routed(tokens);
        let (mut out, mut parallel, compute) =
            (vec![0.0; x.len()], Parallel::default(), networks.compute.clone());
        let mut times = Vec::new();
        for _ in 0..=rounds {
            let tokens = LayerTokens { layer: 0, top: TOP, x: &x, ids: &ids, weights: &weights };
            let begin = Instant::now();
            parallel
                .run(&compute, &mut fabric, whole, tokens, networks, &mut out, DEADLINE)
                .expect("a layer");
            times.push(begin.elapsed().as_secs_f64());
        }
        median(times.split_off(1))
    }
}
