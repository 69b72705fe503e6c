//! The emulator as a [`Device`]: builds `emulate/main.cpp` once and speaks to its process through pipes.

use std::collections::HashMap;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use keyway_kernels::cuda::{Argument, Device, DeviceError, Launch};

use super::compile::Product;

/// A running emulator.
#[derive(Debug)]
pub(crate) struct Emulator {
    process: Child,
    to: BufWriter<ChildStdin>,
    from: BufReader<ChildStdout>,
    buffers: u64,
    launches: u64,
    recordings: HashMap<u64, Vec<Launch>>,
    /// Launches are done when they return, so a copy is made at once.
    fetches: HashMap<u64, Vec<u8>>,
    seed: u64,
    is_hopper: bool,
}

impl Emulator {
    /// Starts one whose threads run in an order that `seed` decides; `None`, with the reason printed, where
    /// there is no C++ compiler.
    pub(crate) fn start(seed: u64) -> Option<Self> {
        static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
        let program = PROGRAM.get_or_init(build).as_ref()?;
        let mut process = Command::new(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the emulator starts");
        let to = BufWriter::new(process.stdin.take().expect("a pipe"));
        let from = BufReader::new(process.stdout.take().expect("a pipe"));
        let (recordings, fetches) = (HashMap::new(), HashMap::new());
        let (buffers, launches, is_hopper) = (0, 0, true);
        Some(Self { process, to, from, buffers, launches, recordings, fetches, seed, is_hopper })
    }

    /// The same without Hopper's matrix units.
    #[allow(dead_code, reason = "cases of kernels name their units themselves")]
    pub(crate) fn without_warpgroups(mut self) -> Self {
        self.is_hopper = false;
        self
    }

    /// Of each kernel that was launched, the fewest bytes of shared memory that a launch asked for and its
    /// blocks did not write.
    #[allow(dead_code, reason = "asked where kernels are tested alone")]
    pub(crate) fn shared_in_vain(&mut self) -> Result<Vec<(String, usize)>, DeviceError> {
        let text = self.ask(b'U')?;
        let entry = |line: &str| line.split_once(' ').map(|(name, n)| (name.to_owned(), n.parse().ok()));
        Ok(text.lines().filter_map(entry).filter_map(|(name, bytes)| Some((name, bytes?))).collect())
    }

    /// What launches must know of the kernels, as the source that `src/cuda/constants.rs` has to be.
    #[allow(dead_code, reason = "asked where kernels are tested alone")]
    pub(crate) fn constants(&mut self) -> Result<String, DeviceError> {
        self.ask(b'C')
    }

    /// How often a block had to wait for others.
    #[allow(dead_code, reason = "asked where kernels are tested alone")]
    pub(crate) fn waits(&mut self) -> Result<u64, DeviceError> {
        self.send(&[b'S'.into()])?;
        let mut count = [0; 8];
        self.receive(&mut count)?;
        Ok(u64::from_le_bytes(count))
    }

    /// The text that answers a command.
    fn ask(&mut self, command: u8) -> Result<String, DeviceError> {
        self.send(&[command.into()])?;
        let mut length = [0; 8];
        self.receive(&mut length)?;
        let mut text = vec![0; u64::from_le_bytes(length) as usize];
        self.receive(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    fn send(&mut self, words: &[u64]) -> Result<(), DeviceError> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.to.write_all(&bytes).map_err(gone)
    }

    fn receive(&mut self, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.to.flush().map_err(gone)?;
        self.from.read_exact(bytes).map_err(gone)
    }
}

fn gone(error: std::io::Error) -> DeviceError {
    DeviceError(format!("the emulator ended; it says why above ({error})"))
}

impl Drop for Emulator {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Device for Emulator {
    fn allocate(&mut self, bytes: usize) -> Result<u64, DeviceError> {
        self.buffers += 1;
        self.send(&[b'A'.into(), self.buffers, bytes as u64])?;
        Ok(self.buffers)
    }

    fn free(&mut self, buffer: u64) {
        let _ = self.send(&[b'F'.into(), buffer]);
    }

    fn address_of(&mut self, buffer: u64) -> Result<u64, DeviceError> {
        self.send(&[b'P'.into(), buffer])?;
        let mut address = [0; 8];
        self.receive(&mut address)?;
        Ok(u64::from_le_bytes(address))
    }

    fn write(&mut self, buffer: u64, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.send(&[b'W'.into(), buffer, offset, bytes.len() as u64])?;
        self.to.write_all(bytes).map_err(gone)
    }

    fn read(&mut self, buffer: u64, offset: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.send(&[b'R'.into(), buffer, offset, bytes.len() as u64])?;
        self.receive(bytes)
    }

    fn fetch(&mut self, buffer: u64, offset: u64, bytes: usize) -> Result<u64, DeviceError> {
        let mut copy = vec![0; bytes];
        self.read(buffer, offset, &mut copy)?;
        self.buffers += 1;
        self.fetches.insert(self.buffers, copy);
        Ok(self.buffers)
    }

    fn collect(&mut self, fetch: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let copy = self.fetches.remove(&fetch).ok_or_else(|| DeviceError("no such fetch".into()))?;
        bytes.copy_from_slice(&copy[..bytes.len()]);
        Ok(())
    }

    fn has_warpgroups(&self) -> bool {
        self.is_hopper
    }

    fn generation(&self) -> String {
        "emulated".into()
    }

    fn processors(&self) -> usize {
        2
    }

    fn free_bytes(&self) -> Result<usize, DeviceError> {
        Ok(1 << 30)
    }

    fn zero(&mut self, buffer: u64, bytes: usize) -> Result<(), DeviceError> {
        self.write(buffer, 0, &vec![0; bytes])
    }

    fn launch(&mut self, launch: &Launch) -> Result<(), DeviceError> {
        self.launches += 1;
        let order = self.seed.wrapping_mul(1_000_003).wrapping_add(self.launches);
        let name = launch.kernel.name();
        self.send(&[b'L'.into(), name.len() as u64])?;
        self.to.write_all(name.as_bytes()).map_err(gone)?;
        self.send(&launch.grid.map(u64::from))?;
        self.send(&[launch.cluster.into(), launch.threads.into(), 1, 1, launch.shared_bytes.into(), order])?;
        self.send(&[launch.arguments.len() as u64])?;
        for argument in &launch.arguments {
            self.send(&match *argument {
                Argument::Pointer { buffer, offset } => [1, buffer, offset],
                Argument::Null => [1, 0, 0],
                Argument::U32(value) => [0, value.into(), 0],
                Argument::F32(value) => [2, value.to_bits().into(), 0],
            })?;
        }
        self.receive(&mut [0; 8])
    }

    fn record(&mut self, launches: &[Launch]) -> Result<u64, DeviceError> {
        // Numbers are not used again, as buffers' are not.
        self.buffers += 1;
        self.recordings.insert(self.buffers, launches.to_vec());
        Ok(self.buffers)
    }

    fn replay(&mut self, recording: u64) -> Result<(), DeviceError> {
        let launches = self.recordings.get(&recording).cloned();
        let launches = launches.ok_or_else(|| DeviceError("a recording that was forgotten".into()))?;
        launches.iter().try_for_each(|launch| self.launch(launch))
    }

    fn forget(&mut self, recording: u64) {
        self.recordings.remove(&recording);
    }
}

fn build() -> Option<PathBuf> {
    let program = Product { folder: "emulator", file: "emulator", source: "emulate/main.cpp", flags: &[] };
    program.build()
}
