//! Messages between GPUs by NCCL's grouped sends and receives: over NVLink, PCIe or a network, whatever it
//! finds. It is the mover of a [`GroupedRank`](crate::fabric::GroupedRank) fabric, whose messages lie in
//! page-locked memory of the host; ranks whose GPUs reach each other's memory leave theirs on the device and
//! take [`Peers`](crate::cuda::peer::Peers). The library, `libnccl.so`, is loaded at run time.
//!
//! NCCL's calls and their order: NVIDIA, "Point-to-point communication" in the NCCL user guide. An operation
//! whose other end stays away never ends, so it is watched, and aborted.

use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, PinnedHostSlice, result as driver};
use cudarc::nccl::result::{self, NcclError};
use cudarc::nccl::sys;

use super::{Gpu, failed};
use crate::cuda::DeviceError;
use crate::fabric::{Fabric, Mover, Phase};

/// Words of a group's name.
const ID_WORDS: usize = size_of::<sys::ncclUniqueId>() / size_of::<u32>();
/// Words that are taken for messages at least.
const ROOM_WORDS_MIN: usize = 1 << 14;
/// How often the end of an operation is asked for without a pause, some 20 us, and the pause after that.
const SPINS: u32 = 200;
const PAUSE: Duration = Duration::from_micros(50);

/// One rank's end of a communicator.
pub struct Nccl {
    comm: Communicator,
    stream: Arc<CudaStream>,
    /// By rank; this one's are empty.
    outboxes: Vec<Room>,
    inboxes: Vec<Room>,
}

/// Memory for a message on both sides of the bus.
struct Room {
    host: PinnedHostSlice<u32>,
    device: CudaSlice<u32>,
}

/// Aborted, and freed, when it goes.
struct Communicator(sys::ncclComm_t);

// SAFETY: a communicator belongs to no thread; it must only not be used by two at once, and an `Nccl` uses
// its own through `&mut self` alone.
unsafe impl Send for Communicator {}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nccl").field("ranks", &self.outboxes.len()).finish_non_exhaustive()
    }
}

impl Nccl {
    /// Whether the loader finds the library.
    pub fn is_here() -> bool {
        // SAFETY: only opens the library and closes it again.
        unsafe { sys::is_culib_present() }
    }

    /// The rank that `control` has, on a GPU that no other rank of the group uses; all ranks join at once.
    /// Messages of the group's name go over `control`, which must take 32 words.
    ///
    /// # Errors
    /// Without the library, if a rank does not answer within `deadline`, or what NCCL says.
    pub fn join(gpu: &Gpu, control: &mut dyn Fabric, deadline: Duration) -> Result<Self, DeviceError> {
        if !Self::is_here() {
            return Err(DeviceError("no libnccl.so where the loader looks: install NCCL 2".into()));
        }
        gpu.enter()?;
        let id = agree(control, deadline)?;
        let stream = gpu.stream.context().new_stream().map_err(failed)?;
        let (size, rank) = (control.size() as c_int, control.rank() as c_int);
        let mut comm = std::ptr::null_mut();
        // SAFETY: the place for the communicator is alive for the call, in which all ranks take part, each
        // with its own number.
        unsafe { result::comm_init_rank(&raw mut comm, size, id, rank) }.map_err(refused)?;
        let comm = Communicator(comm);
        let rooms = || (0..size).map(|_| Room::new(&stream, 0)).collect::<Result<Vec<Room>, DeviceError>>();
        Ok(Self { comm, outboxes: rooms()?, inboxes: rooms()?, stream })
    }

    /// Begins the copies and the messages, in the stream's order.
    fn begin(&mut self, sent: &[usize], expected: &[usize]) -> Result<(), DeviceError> {
        self.stream.context().bind_to_thread().map_err(failed)?;
        for (inbox, words) in self.inboxes.iter_mut().zip(expected) {
            inbox.reserve(&self.stream, *words)?;
        }
        for (outbox, words) in self.outboxes.iter_mut().zip(sent).filter(|(_, words)| **words > 0) {
            outbox.upload(&self.stream, *words)?;
        }
        result::group_start().map_err(refused)?;
        let queued = self.queue(sent, expected);
        // Also after an error, or the next group would be inside this one.
        let ended = result::group_end().map_err(refused);
        queued.and(ended)?;
        for (inbox, words) in self.inboxes.iter_mut().zip(expected).filter(|(_, words)| **words > 0) {
            inbox.download(&self.stream, *words)?;
        }
        Ok(())
    }

    fn queue(&self, sent: &[usize], expected: &[usize]) -> Result<(), DeviceError> {
        let (comm, stream) = (self.comm.0, self.stream.cu_stream().cast());
        let word = sys::ncclDataType_t::ncclUint32;
        for (rank, (outbox, words)) in
            self.outboxes.iter().zip(sent).enumerate().filter(|(_, (_, words))| **words > 0)
        {
            // SAFETY: the room has as many words, and is neither freed nor written before the stream has come
            // to an end or the communicator is aborted.
            unsafe {
                result::send(outbox.address(&self.stream) as _, *words, word, rank as c_int, comm, stream)
            }
            .map_err(refused)?;
        }
        for (rank, (inbox, words)) in
            self.inboxes.iter().zip(expected).enumerate().filter(|(_, (_, words))| **words > 0)
        {
            // SAFETY: as above; the room is not read before.
            unsafe {
                result::recv(inbox.address(&self.stream) as _, *words, word, rank as c_int, comm, stream)
            }
            .map_err(refused)?;
        }
        Ok(())
    }

    /// Waits until all that was begun is through.
    fn wait(&self, until: Instant) -> Result<(), DeviceError> {
        let end = self.stream.record_event(None).map_err(failed)?;
        let mut spins = 0;
        while !end.try_is_complete().map_err(failed)? {
            let mut state = sys::ncclResult_t::ncclSuccess;
            // SAFETY: the communicator is alive, and so is the place for its state.
            unsafe { sys::ncclCommGetAsyncError(self.comm.0, &raw mut state) }.result().map_err(refused)?;
            state.result().map_err(refused)?;
            if Instant::now() >= until {
                return Err(DeviceError("nothing came over NCCL in time".into()));
            }
            spins += 1;
            if spins > SPINS {
                thread::park_timeout(PAUSE);
            }
        }
        Ok(())
    }
}

impl Mover for Nccl {
    type Error = DeviceError;

    fn outbox(&mut self, to: usize, words: usize) -> Option<&mut [u32]> {
        let outbox = &mut self.outboxes[to];
        outbox.reserve(&self.stream, words).ok()?;
        outbox.host.as_mut_slice().ok()?.get_mut(..words)
    }

    fn swap(&mut self, sent: &[usize], expected: &[usize], until: Instant) -> Result<(), DeviceError> {
        let moved = self.begin(sent, expected).and_then(|()| self.wait(until));
        if moved.is_err() {
            // What still waits for other ranks ends by it.
            self.comm.abort();
        }
        moved
    }

    fn inbox(&self, from: usize, words: usize) -> &[u32] {
        self.inboxes[from].host.as_slice().ok().and_then(|host| host.get(..words)).unwrap_or(&[])
    }
}

impl Communicator {
    fn abort(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the communicator is alive, and not used again. What it says then changes nothing.
            let _ = unsafe { result::comm_abort(self.0) };
            self.0 = std::ptr::null_mut();
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.abort();
    }
}

impl Room {
    fn new(stream: &Arc<CudaStream>, words: usize) -> Result<Self, DeviceError> {
        let words = words.next_power_of_two().max(ROOM_WORDS_MIN);
        // SAFETY: words without a value are written before they are read: by who fills an outbox, and by
        // `download`.
        let host = unsafe { stream.context().alloc_pinned_with_flags(words, 0) }.map_err(failed)?;
        // SAFETY: as above: by `upload`, and by NCCL.
        let device = unsafe { stream.alloc(words) }.map_err(failed)?;
        Ok(Self { host, device })
    }

    /// Makes room for so many words; what it held is lost if it had none.
    fn reserve(&mut self, stream: &Arc<CudaStream>, words: usize) -> Result<(), DeviceError> {
        if words > self.device.len() {
            *self = Self::new(stream, words)?;
        }
        Ok(())
    }

    fn address(&self, stream: &CudaStream) -> u64 {
        self.device.device_ptr(stream).0
    }

    fn upload(&self, stream: &CudaStream, words: usize) -> Result<(), DeviceError> {
        let words = &self.host.as_slice().map_err(failed)?[..words];
        // SAFETY: the room is as large on the device; who fills it next waits for the stream before.
        unsafe { driver::memcpy_htod_async(self.address(stream), words, stream.cu_stream()) }.map_err(failed)
    }

    fn download(&mut self, stream: &CudaStream, words: usize) -> Result<(), DeviceError> {
        let address = self.address(stream);
        let words = &mut self.host.as_mut_slice().map_err(failed)?[..words];
        // SAFETY: the room is as large on the device; the host's words are not read before the stream has
        // come to this copy's end.
        unsafe { driver::memcpy_dtoh_async(words, address, stream.cu_stream()) }.map_err(failed)
    }
}

/// Rank 0 names the group, and tells the others.
fn agree(control: &mut dyn Fabric, deadline: Duration) -> Result<sys::ncclUniqueId, DeviceError> {
    let told = |error: crate::fabric::FabricError| DeviceError(error.to_string());
    let mut id = sys::ncclUniqueId { internal: [0; 128] };
    if control.rank() == 0 {
        id = result::get_uniqueid().map_err(refused)?;
        let bytes = id.internal.map(|byte| byte.to_ne_bytes()[0]);
        for to in 1..control.size() {
            let words = control.outbox(to, ID_WORDS).map_err(told)?;
            for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
                *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
        }
    }
    control.exchange(Phase::Placement, deadline).map_err(told)?;
    if control.rank() > 0 {
        let words = control.inbox(0);
        if words.len() != ID_WORDS {
            return Err(DeviceError("rank 0 sent no name for the group".into()));
        }
        for (byte, told) in id.internal.iter_mut().zip(words.iter().flat_map(|word| word.to_le_bytes())) {
            *byte = std::ffi::c_char::from_ne_bytes([told]);
        }
    }
    Ok(id)
}

fn refused(error: NcclError) -> DeviceError {
    DeviceError(format!("NCCL: {:?}", error.0))
}
