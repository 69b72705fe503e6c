//! Time from the process's start to its first answer, and the memory it holds then: `cargo bench -p
//! keyway-worker --bench start [-- MODEL]`. Medians of 20 starts with the built-in model, unless another is
//! named.

use std::error::Error;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const STARTS: usize = 20;
/// What the built-in model must keep on 2 cores.
const READY_MAX: Duration = Duration::from_millis(300);
/// What a worker may hold beside weights and KV, in MiB.
const OTHER_MAX_MIB: f64 = 60.0;

/// One start.
struct Start {
    ready: Duration,
    /// Resident, in MiB, when it is ready and after an answer of a few tokens.
    held_mib: [f64; 2],
    weights_mib: f64,
    kv_mib: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let model =
        std::env::args().skip(1).find(|arg| !arg.starts_with("--")).unwrap_or_else(|| "builtin".into());
    let starts = (0..STARTS).map(|_| start(&model)).collect::<Result<Vec<_>, _>>()?;
    let median = |value: fn(&Start) -> f64| {
        let mut values: Vec<f64> = starts.iter().map(value).collect();
        values.sort_by(f64::total_cmp);
        (values[STARTS / 2], values[0], values[STARTS - 1])
    };
    let (ready, best, worst) = median(|s| s.ready.as_secs_f64() * 1e3);
    let (weights, ..) = median(|s| s.weights_mib);
    let (kv, ..) = median(|s| s.kv_mib);
    println!("model {model}: {STARTS} starts, weights {weights:.0} MiB, KV cache {kv:.0} MiB (reserved)");
    println!("start to first answer: median {ready:.0} ms (best {best:.0}, worst {worst:.0})");
    let (at_ready, ..) = median(|s| s.held_mib[0]);
    let (after, ..) = median(|s| s.held_mib[1]);
    let other = after - weights;
    println!(
        "resident: {at_ready:.1} MiB when ready, {after:.1} MiB after an answer: {other:.1} MiB beside the weights"
    );
    if model == "builtin" {
        let kept = |holds: bool| if holds { "kept" } else { "MISSED" };
        println!("{} ms: {}", READY_MAX.as_millis(), kept(ready <= READY_MAX.as_secs_f64() * 1e3));
        println!("{OTHER_MAX_MIB} MiB: {}", kept(other <= OTHER_MAX_MIB));
    }
    Ok(())
}

fn start(model: &str) -> Result<Start, Box<dyn Error>> {
    let begin = Instant::now();
    let mut child = Command::new(env!("CARGO_BIN_EXE_keyway-worker"))
        .args(["--model", model, "--listen", "127.0.0.1:0"])
        .stderr(Stdio::piped())
        .spawn()?;
    let measured = measure(&mut child, begin);
    child.kill()?;
    child.wait()?;
    measured
}

fn measure(child: &mut Child, begin: Instant) -> Result<Start, Box<dyn Error>> {
    let log = BufReader::new(child.stderr.take().ok_or("no log")?);
    let ready = log.lines().map_while(Result::ok).find(|line| line.contains("ready on http://"));
    let ready = ready.ok_or("it ended before it was ready")?;
    let addr =
        ready.split("http://").nth(1).and_then(|rest| rest.split_whitespace().next()).ok_or("no address")?;
    request(addr, "GET /health HTTP/1.1\r\nhost: w\r\nconnection: close\r\n\r\n")?;
    let took = begin.elapsed();
    let field =
        |name: &str| -> Option<f64> { ready.split(name).nth(1)?.split_whitespace().next()?.parse().ok() };
    let held = held_mib(child.id())?;
    let body = r#"{"messages": [{"role": "user", "content": "What is Keyway?"}], "max_tokens": 8}"#;
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: w\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    request(addr, &head)?;
    Ok(Start {
        ready: took,
        held_mib: [held, held_mib(child.id())?],
        weights_mib: field("weights_mib=").ok_or("no weights_mib")?,
        kv_mib: field("kv_mib=").ok_or("no kv_mib")?,
    })
}

fn request(addr: &str, text: &str) -> Result<(), Box<dyn Error>> {
    let mut stream = TcpStream::connect(addr)?;
    stream.write_all(text.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    if answer.starts_with("HTTP/1.1 200") { Ok(()) } else { Err(answer.into()) }
}

fn held_mib(pid: u32) -> Result<f64, Box<dyn Error>> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").trim().parse::<f64>()? / 1024.0)
}
