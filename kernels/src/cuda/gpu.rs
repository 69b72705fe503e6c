//! An NVIDIA GPU as a [`Device`]: the driver through cudarc, loaded at run time, and the committed fatbins:
//! those of compute capability 8.0 or newer, with a driver for CUDA 13.0 or newer. Chooses no kernel and no
//! shape.
#![allow(unsafe_code, reason = "launches and raw copies; each block says why it is sound")]

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use cudarc::driver::{
    CudaContext, CudaEvent, CudaGraph, CudaSlice, CudaStream, DevicePtr, PinnedHostSlice, result,
};

use self::modules::{Function, Modules};
use super::{Argument, Device, DeviceError, Launch};

pub mod ipc;
mod modules;
pub mod nccl;

/// Bytes of each of two pieces of page-locked memory through which copies go in turn, so that one is filled
/// while the device still reads the other.
const STAGING_BYTES: usize = 8 << 20;
/// Bytes of page-locked memory that a fetch takes at least: few sizes, so that it is used again.
const FETCH_BYTES_MIN: usize = 4096;
/// If set, each launch begins once the one before has ended, also on devices that could overlap them: to find
/// out whether a fault, or how much of the speed, comes of it.
const SERIAL_LAUNCHES: &str = "KEYWAY_SERIAL_LAUNCHES";
/// How the modules begin whose launches always do: a layer of experts with one token takes an H200 41 us so,
/// and 51 us where its products take their places while the others still read their weights.
const APART: &str = "moe";
/// What the fatbins were compiled for, as `cuDriverGetVersion` says it, and the first driver that has it.
const CUDA_VERSION: i32 = 13_000;
const DRIVER: u32 = 580;
/// The least compute capability that they have code for.
const CAPABILITY: (i32, i32) = (8, 0);

/// A recording of launches.
struct Recording(CudaGraph);

// SAFETY: the driver's graphs belong to no thread, they must only not be used by two at once; a `Gpu` owns
// its own and uses them through `&mut self` alone.
unsafe impl Send for Recording {}

impl fmt::Debug for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Recording")
    }
}

/// Page-locked memory, and the point on the stream behind the last copy that uses it.
#[derive(Debug)]
struct Pinned {
    memory: PinnedHostSlice<u8>,
    used: Option<CudaEvent>,
}

impl Pinned {
    fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, DeviceError> {
        // SAFETY: bytes without a value are written before they are read: by `write`, and by the copies of
        // `read` and `collect`.
        let memory = unsafe { context.alloc_pinned_with_flags(bytes, 0) }.map_err(failed)?;
        Ok(Self { memory, used: None })
    }

    /// The memory, once no copy uses it any more.
    fn bytes(&mut self) -> Result<&mut [u8], DeviceError> {
        if let Some(used) = self.used.take() {
            used.synchronize().map_err(failed)?;
        }
        self.memory.as_mut_slice().map_err(failed)
    }
}

/// One GPU and a stream on it.
#[derive(Debug)]
pub struct Gpu {
    stream: Arc<CudaStream>,
    modules: Modules,
    buffers: HashMap<u64, CudaSlice<u8>>,
    recordings: HashMap<u64, Recording>,
    /// Taken with the first copies; the one used last comes last.
    staging: Vec<Pinned>,
    fetches: HashMap<u64, Pinned>,
    /// Memory of fetches that were collected.
    spare: Vec<Pinned>,
    /// Points in the order of launches, where they are asked for.
    marks: Option<Vec<CudaEvent>>,
    /// Whether kernels wait for earlier launches themselves: code for Hopper does, which others cannot run.
    overlaps: bool,
    next: u64,
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // A copy may still read the staging memory; after an error there is nothing to wait for.
        let _ = self.stream.synchronize();
    }
}

fn failed(error: impl std::fmt::Debug) -> DeviceError {
    DeviceError(format!("{error:?}"))
}

impl Gpu {
    /// The GPU of this number. Errs with one line where there is no driver or no such GPU, or where either is
    /// too old.
    pub fn new(ordinal: usize) -> Result<Self, DeviceError> {
        // SAFETY: only opens the library and closes it again.
        if !unsafe { sys::is_culib_present() } {
            let advice = "no NVIDIA driver (libcuda) on this machine: run with --device cpu";
            return Err(DeviceError(advice.into()));
        }
        let mut version = 0;
        // SAFETY: the driver writes one number.
        unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().map_err(failed)?;
        if version < CUDA_VERSION {
            let [major, minor] = [version / 1000, version % 1000 / 10];
            let why = format!("the NVIDIA driver is for CUDA {major}.{minor}, and the kernels need 13.0");
            return Err(DeviceError(format!(
                "{why}: take driver {DRIVER} or newer, or run with --device cpu"
            )));
        }
        let none = |e| DeviceError(format!("no usable NVIDIA GPU {ordinal} ({e:?}): run with --device cpu"));
        let context = CudaContext::new(ordinal).map_err(none)?;
        let (major, minor) = context.compute_capability().map_err(none)?;
        if (major, minor) < CAPABILITY {
            let name = context.name().map_err(none)?;
            let why = format!("GPU {ordinal}, {name}, has compute capability {major}.{minor}");
            return Err(DeviceError(format!("{why}, and the kernels need 8.0: run with --device cpu")));
        }
        // SAFETY: all work goes to this value's one stream, so there is nothing for events to order; and a
        // capture would fail with them.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(failed)?;
        let is_hopper = context.compute_capability().map_err(failed)?.0 == 9;
        let overlaps = is_hopper && std::env::var_os(SERIAL_LAUNCHES).is_none();
        let (buffers, recordings) = (HashMap::new(), HashMap::new());
        let (staging, fetches, spare) = (Vec::new(), HashMap::new(), Vec::new());
        Ok(Self {
            stream,
            modules: Modules::default(),
            buffers,
            recordings,
            staging,
            fetches,
            spare,
            marks: None,
            overlaps,
            next: 0,
        })
    }

    /// How many GPUs there are; 0 without a driver.
    pub fn count() -> usize {
        // SAFETY: only opens the library and closes it again.
        if !unsafe { sys::is_culib_present() } {
            return 0;
        }
        CudaContext::device_count().map_or(0, |count| count.max(0) as usize)
    }

    /// Its name, as the driver says it.
    pub fn name(&self) -> Result<String, DeviceError> {
        self.stream.context().name().map_err(failed)
    }

    /// Milliseconds that each of `repeats` replays of `launches` took, captured as one graph so that no
    /// launch waits for the host.
    pub fn time(&mut self, launches: &[Launch], repeats: usize) -> Result<Vec<f32>, DeviceError> {
        self.time_after(&[], launches, repeats)
    }

    /// The same of launches before each replay of which `before` must go, which is not timed.
    pub fn time_after(
        &mut self,
        before: &[Launch],
        launches: &[Launch],
        repeats: usize,
    ) -> Result<Vec<f32>, DeviceError> {
        // Once before: surfaces what is wrong outside of the capture.
        before.iter().chain(launches).try_for_each(|launch| self.launch(launch))?;
        self.stream.synchronize().map_err(failed)?;
        let first = if before.is_empty() { None } else { Some(self.captured(before)?) };
        let prepare = || first.as_ref().map_or(Ok(()), |Recording(graph)| graph.launch().map_err(failed));
        let Recording(graph) = self.captured(launches)?;
        let timing = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        for _ in 0..3 {
            prepare()?;
            graph.launch().map_err(failed)?;
        }
        let mut times = Vec::with_capacity(repeats);
        for _ in 0..repeats {
            prepare()?;
            let start = self.stream.record_event(timing).map_err(failed)?;
            graph.launch().map_err(failed)?;
            let end = self.stream.record_event(timing).map_err(failed)?;
            times.push(start.elapsed_ms(&end).map_err(failed)?);
        }
        Ok(times)
    }

    /// Begins to keep the marks of [`Device::mark`].
    pub fn watch(&mut self) {
        self.marks = Some(Vec::new());
    }

    /// Milliseconds from each mark since [`Gpu::watch`] to the next one; keeps no more of them.
    pub fn marked(&mut self) -> Result<Vec<f32>, DeviceError> {
        let marks = self.marks.take().unwrap_or_default();
        marks.windows(2).map(|pair| pair[0].elapsed_ms(&pair[1]).map_err(failed)).collect()
    }

    /// The launches as one graph.
    fn captured(&mut self, launches: &[Launch]) -> Result<Recording, DeviceError> {
        // A module cannot be loaded within a capture.
        launches.iter().try_for_each(|launch| self.kernel(launch).map(drop))?;
        self.stream
            .begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .map_err(failed)?;
        // The first one has none before it that it could follow.
        let captured = launches.iter().enumerate().try_for_each(|(i, launch)| self.start(launch, i > 0));
        // Ended in any case, or the stream would stay captured; but a launch that failed is why the capture
        // did.
        let graph = self.stream.end_capture(sys::CUgraphInstantiate_flags_enum(0)).map_err(failed);
        captured?;
        graph?.map(Recording).ok_or_else(|| DeviceError("the capture holds no work".into()))
    }

    fn buffer(&self, buffer: u64, offset: u64, bytes: usize) -> Result<&CudaSlice<u8>, DeviceError> {
        let slice = self.buffers.get(&buffer).ok_or_else(|| DeviceError(format!("no buffer {buffer}")))?;
        if offset as usize + bytes > slice.len() {
            return Err(DeviceError(format!("buffer {buffer} has no {bytes} bytes at {offset}")));
        }
        Ok(slice)
    }

    /// The address of a buffer's byte.
    fn address(&self, buffer: u64, offset: u64, bytes: usize) -> Result<u64, DeviceError> {
        let slice = self.buffer(buffer, offset, bytes)?;
        Ok(slice.device_ptr(&self.stream).0 + offset)
    }

    /// Makes the context that of the calling thread: a worker's engine is not the thread that loaded its
    /// model.
    fn enter(&self) -> Result<(), DeviceError> {
        self.stream.context().bind_to_thread().map_err(failed)
    }

    /// The piece of staging memory whose turn it is.
    fn staging(&mut self) -> Result<Pinned, DeviceError> {
        if self.staging.len() < 2 {
            return Pinned::new(self.stream.context(), STAGING_BYTES);
        }
        Ok(self.staging.remove(0))
    }

    /// Takes note that a copy was begun that uses the memory.
    fn in_use(&self, mut pinned: Pinned) -> Result<Pinned, DeviceError> {
        pinned.used = Some(self.stream.record_event(None).map_err(failed)?);
        Ok(pinned)
    }

    /// Sets bytes from a buffer's beginning.
    fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<(), DeviceError> {
        self.enter()?;
        // SAFETY: the callers' addresses are of buffers with as many bytes, which live on this stream.
        unsafe { result::memset_d8_async(address, byte, bytes, self.stream.cu_stream()) }.map_err(failed)
    }

    /// Loads all kernels that this GPU has code for, so that what cannot be loaded shows now; where there is
    /// no machine code for it the driver compiles them, which takes it a minute or two the first time.
    pub fn load_all(&mut self) -> Result<(), DeviceError> {
        self.enter()?;
        let is_hopper = self.has_warpgroups();
        self.modules.load_all(self.stream.context(), is_hopper)
    }

    /// Starts a kernel behind what the stream has. If `follows`, its blocks may take their places while the
    /// launch before still runs; all kernels wait for it themselves where the device can do that (`follow` in
    /// `platform.cuh`).
    fn start(&mut self, launch: &Launch, follows: bool) -> Result<(), DeviceError> {
        let kernel = self.kernel(launch)?;
        // A word for each argument, little-endian: an argument of four bytes is the beginning of its word.
        let words = launch.arguments.iter().map(|argument| match *argument {
            Argument::Pointer { buffer, offset } => self.address(buffer, offset, 0),
            Argument::Null => Ok(0),
            Argument::U32(value) => Ok(u64::from(value).to_le()),
            Argument::F32(value) => Ok(u64::from(value.to_bits()).to_le()),
        });
        let mut words = words.collect::<Result<Vec<u64>, DeviceError>>()?;
        let mut pointers: Vec<*mut c_void> =
            words.iter_mut().map(|word| ptr::from_mut(word).cast()).collect();
        let mut attributes = self.attributes(launch, follows);
        let [x, y, z] = launch.grid;
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: self.stream.cu_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        self.enter()?;
        // SAFETY: the launcher that made `launch` names the kernel's arguments in its order and types, which
        // the same kernel in the emulator confirms, and has checked that buffers are as long as the kernel
        // reads and writes. The driver copies the arguments before it returns.
        unsafe {
            sys::cuLaunchKernelEx(&raw const config, kernel.function, pointers.as_mut_ptr(), ptr::null_mut())
        }
        .result()
        .map_err(|e| DeviceError(format!("{}: {e:?}", launch.kernel)))
    }

    /// What a launch says beyond its sizes: that it may overlap, and its clusters.
    fn attributes(&self, launch: &Launch, follows: bool) -> Vec<sys::CUlaunchAttribute> {
        use sys::CUlaunchAttributeID as Id;
        use sys::{CUlaunchAttributeValue as Value, CUlaunchAttributeValue_union__bindgen_ty_1 as Blocks};
        let attribute = |id: Id, value: Value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let mut attributes = Vec::with_capacity(2);
        if follows && self.overlaps && !launch.kernel.module().starts_with(APART) {
            let value = Value { programmaticStreamSerializationAllowed: 1 };
            attributes.push(attribute(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value));
        }
        if launch.cluster != 1 {
            let value = Value { clusterDim: Blocks { x: launch.cluster, y: 1, z: 1 } };
            attributes.push(attribute(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value));
        }
        attributes
    }

    /// The launch's kernel, if its blocks can have what they ask for.
    fn kernel(&mut self, launch: &Launch) -> Result<Function, DeviceError> {
        self.enter()?;
        let kernel = self.modules.kernel(self.stream.context(), launch.kernel)?;
        if launch.shared_bytes > kernel.shared_bytes {
            let (wanted, most) = (launch.shared_bytes, kernel.shared_bytes);
            let what = format!("{} needs {wanted} bytes of shared memory", launch.kernel);
            return Err(DeviceError(format!("{what} a block, and this GPU has {most}")));
        }
        Ok(kernel)
    }
}

impl Device for Gpu {
    fn allocate(&mut self, bytes: usize) -> Result<u64, DeviceError> {
        // The driver refuses buffers of nothing.
        // SAFETY: the bytes are set below, before anyone can read them.
        let slice = unsafe { self.stream.alloc::<u8>(bytes.max(1)) }.map_err(failed)?;
        let address = slice.device_ptr(&self.stream).0;
        self.fill(address, 0xff, bytes.max(1))?;
        self.next += 1;
        self.buffers.insert(self.next, slice);
        Ok(self.next)
    }

    fn free(&mut self, buffer: u64) {
        self.buffers.remove(&buffer);
    }

    fn address_of(&mut self, buffer: u64) -> Result<u64, DeviceError> {
        self.address(buffer, 0, 0)
    }

    fn write(&mut self, buffer: u64, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let mut address = self.address(buffer, offset, bytes.len())?;
        self.enter()?;
        for part in bytes.chunks(STAGING_BYTES) {
            let mut staging = self.staging()?;
            let staged = &mut staging.bytes()?[..part.len()];
            staged.copy_from_slice(part);
            // SAFETY: `address` has room for the part, and the staging memory is not touched again before the
            // event behind this copy, nor freed before the stream has come to its end.
            unsafe { result::memcpy_htod_async(address, staged, self.stream.cu_stream()) }.map_err(failed)?;
            let staging = self.in_use(staging)?;
            self.staging.push(staging);
            address += part.len() as u64;
        }
        Ok(())
    }

    fn read(&mut self, buffer: u64, offset: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        for (i, part) in bytes.chunks_mut(STAGING_BYTES).enumerate() {
            let fetch = self.fetch(buffer, offset + (i * STAGING_BYTES) as u64, part.len())?;
            self.collect(fetch, part)?;
        }
        Ok(())
    }

    fn fetch(&mut self, buffer: u64, offset: u64, bytes: usize) -> Result<u64, DeviceError> {
        let address = self.address(buffer, offset, bytes)?;
        self.enter()?;
        let room = bytes.next_power_of_two().max(FETCH_BYTES_MIN);
        let spare = self.spare.iter().position(|pinned| pinned.memory.len() == room);
        let mut pinned = match spare {
            Some(spare) => self.spare.swap_remove(spare),
            None => Pinned::new(self.stream.context(), room)?,
        };
        let to = &mut pinned.bytes()?[..bytes];
        if bytes > 0 {
            // SAFETY: `address` has as many bytes, and the memory is not touched before the event behind this
            // copy, nor freed before the stream has come to its end.
            unsafe { result::memcpy_dtoh_async(to, address, self.stream.cu_stream()) }.map_err(failed)?;
        }
        let pinned = self.in_use(pinned)?;
        self.next += 1;
        self.fetches.insert(self.next, pinned);
        Ok(self.next)
    }

    fn collect(&mut self, fetch: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let pinned = self.fetches.remove(&fetch);
        let mut pinned = pinned.ok_or_else(|| DeviceError(format!("no fetch {fetch}")))?;
        bytes.copy_from_slice(&pinned.bytes()?[..bytes.len()]);
        self.spare.push(pinned);
        Ok(())
    }

    fn mark(&mut self) -> Result<(), DeviceError> {
        if let Some(marks) = &mut self.marks {
            let timing = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
            marks.push(self.stream.record_event(timing).map_err(failed)?);
        }
        Ok(())
    }

    fn has_warpgroups(&self) -> bool {
        self.stream.context().compute_capability().is_ok_and(|(major, _)| major == 9)
    }

    fn generation(&self) -> String {
        let known = self.stream.context().compute_capability();
        known.map_or_else(|_| "unknown".into(), |(major, minor)| format!("sm_{major}{minor}"))
    }

    fn processors(&self) -> usize {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        self.stream.context().attribute(attribute).map_or(1, |n| n.max(1) as usize)
    }

    fn free_bytes(&self) -> Result<usize, DeviceError> {
        // What was taken is taken once the stream has come to it.
        self.stream.synchronize().map_err(failed)?;
        self.stream.context().mem_get_info().map(|(free, _)| free).map_err(failed)
    }

    fn zero(&mut self, buffer: u64, bytes: usize) -> Result<(), DeviceError> {
        let address = self.address(buffer, 0, bytes)?;
        if bytes == 0 { Ok(()) } else { self.fill(address, 0, bytes) }
    }

    fn record(&mut self, launches: &[Launch]) -> Result<u64, DeviceError> {
        let recording = self.captured(launches)?;
        self.next += 1;
        self.recordings.insert(self.next, recording);
        Ok(self.next)
    }

    fn replay(&mut self, recording: u64) -> Result<(), DeviceError> {
        let known = self.recordings.get(&recording);
        let Recording(graph) = known.ok_or_else(|| DeviceError(format!("no recording {recording}")))?;
        graph.launch().map_err(failed)
    }

    fn forget(&mut self, recording: u64) {
        // A replay may still be under way; if waiting fails, so does whatever comes next.
        let _ = self.stream.synchronize();
        self.recordings.remove(&recording);
    }

    fn launch(&mut self, launch: &Launch) -> Result<(), DeviceError> {
        self.start(launch, true)
    }
}
