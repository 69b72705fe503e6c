//! One emulated device for the ranks of a group, each a thread that launches as if it were a process. An
//! emulated launch is done when it returns, so one that waits for messages begins once every rank has
//! launched what sends them, or has left.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use keyway_kernels::cuda::peer::{HANDLE_BYTES, Layout, Mailboxes, exchange_handles};
use keyway_kernels::cuda::{Device, DeviceError, Kernel, Launch};
use keyway_kernels::fabric::Fabric;

use super::*;
use crate::model::cuda::OpenMailboxes;

/// What sends, and what waits for it, in either direction.
const SENDS: [Kernel; 2] = [Kernel::peer_dispatch_send, Kernel::peer_combine_send];
const WAITS: [Kernel; 2] = [Kernel::peer_dispatch_receive, Kernel::peer_combine_receive];

pub(super) const OPEN: OpenMailboxes<SharedDevice> = open;

/// A rank's view of the device.
#[derive(Debug)]
pub(super) struct SharedDevice {
    shared: Arc<Shared>,
    rank: usize,
    /// Which of the views there ever were.
    number: u64,
    /// How often it waited, in either direction.
    waited: [u64; 2],
    recordings: HashMap<u64, Vec<Launch>>,
    /// Launches of the exchange until the device fails this rank, and how.
    left: Option<(u64, Fails)>,
}

/// How a device fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fails {
    /// With an error, after which its rank ends.
    Errs,
    /// It does nothing any more, of which its rank does not learn.
    Hangs,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    emulator: Emulator,
    views: u64,
    /// By rank, the view that is in the group, and how often it sent.
    present: Vec<Option<(u64, [u64; 2])>>,
}

impl SharedDevice {
    /// Rank 0's view of a new device.
    pub(super) fn start(ranks: usize) -> Option<Self> {
        let emulator = Emulator::start(1)?;
        let state = Mutex::new(State { emulator, views: 0, present: vec![None; ranks] });
        Some(Self::view(Arc::new(Shared { state, changed: Condvar::new() }), 0, None))
    }

    /// Another rank's, which fails after so many launches of the exchange.
    pub(super) fn of_rank(&self, rank: usize, left: Option<(u64, Fails)>) -> Self {
        Self::view(Arc::clone(&self.shared), rank, left)
    }

    fn view(shared: Arc<Shared>, rank: usize, left: Option<(u64, Fails)>) -> Self {
        let number = {
            let mut state = shared.lock();
            state.views += 1;
            state.views
        };
        Self { shared, rank, number, waited: [0; 2], recordings: HashMap::new(), left }
    }

    fn on<T>(&self, run: impl FnOnce(&mut Emulator) -> T) -> T {
        run(&mut self.shared.lock().emulator)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SharedDevice {
    /// Nobody waits for this rank's launches any more.
    fn leave(&self) {
        let own = &mut self.shared.lock().present[self.rank];
        if own.is_some_and(|(number, _)| number == self.number) {
            *own = None;
        }
        self.shared.changed.notify_all();
    }
}

impl Drop for SharedDevice {
    fn drop(&mut self) {
        self.leave();
    }
}

/// As processes do it: an address goes where a handle would.
fn open(
    device: &mut SharedDevice,
    layout: Layout,
    fabric: &mut dyn Fabric,
    deadline: Duration,
) -> Result<Mailboxes, DeviceError> {
    device.waited = [0; 2];
    device.shared.lock().present[device.rank] = Some((device.number, [0; 2]));
    let buffer = device.allocate(layout.mailbox_bytes())?;
    let mut handle = [0; HANDLE_BYTES];
    handle[..8].copy_from_slice(&device.address_of(buffer)?.to_le_bytes());
    let handles = exchange_handles(fabric, &layout, handle, deadline);
    let handles = handles.map_err(|error| DeviceError(error.to_string()))?;
    let address = |handle: &[u8; HANDLE_BYTES]| u64::from_le_bytes(*handle.first_chunk().unwrap());
    Ok(Mailboxes::kept_by(layout, handles.iter().map(address).collect(), Box::new(())))
}

impl Device for SharedDevice {
    fn allocate(&mut self, bytes: usize) -> Result<u64, DeviceError> {
        self.on(|emulator| emulator.allocate(bytes))
    }

    fn free(&mut self, buffer: u64) {
        self.on(|emulator| emulator.free(buffer));
    }

    fn address_of(&mut self, buffer: u64) -> Result<u64, DeviceError> {
        self.on(|emulator| emulator.address_of(buffer))
    }

    fn write(&mut self, buffer: u64, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.on(|emulator| emulator.write(buffer, offset, bytes))
    }

    fn read(&mut self, buffer: u64, offset: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.on(|emulator| emulator.read(buffer, offset, bytes))
    }

    fn fetch(&mut self, buffer: u64, offset: u64, bytes: usize) -> Result<u64, DeviceError> {
        self.on(|emulator| emulator.fetch(buffer, offset, bytes))
    }

    fn collect(&mut self, fetch: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.on(|emulator| emulator.collect(fetch, bytes))
    }

    fn has_warpgroups(&self) -> bool {
        true
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
        self.on(|emulator| emulator.zero(buffer, bytes))
    }

    fn launch(&mut self, launch: &Launch) -> Result<(), DeviceError> {
        if self.left == Some((0, Fails::Hangs)) {
            // Nor does it do what is no part of the exchange.
            self.leave();
            return Ok(());
        }
        if let (Some((left, _)), "peer") = (&mut self.left, launch.kernel.module()) {
            *left = left.checked_sub(1).ok_or_else(|| DeviceError("the device failed this rank".into()))?;
        }
        let phase = |names: [Kernel; 2]| names.iter().position(|name| *name == launch.kernel);
        let mut state = self.shared.lock();
        if let Some(phase) = phase(WAITS) {
            self.waited[phase] += 1;
            let round = self.waited[phase];
            let behind = |state: &State| state.present.iter().flatten().any(|(_, sent)| sent[phase] < round);
            while behind(&state) {
                state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
        state.emulator.launch(launch)?;
        if let (Some(phase), Some((_, sent))) = (phase(SENDS), &mut state.present[self.rank]) {
            sent[phase] += 1;
            self.shared.changed.notify_all();
        }
        Ok(())
    }

    fn record(&mut self, launches: &[Launch]) -> Result<u64, DeviceError> {
        let number = self.on(|emulator| emulator.record(launches))?;
        self.recordings.insert(number, launches.to_vec());
        Ok(number)
    }

    fn replay(&mut self, recording: u64) -> Result<(), DeviceError> {
        let launches = self.recordings.get(&recording).cloned();
        let launches = launches.ok_or_else(|| DeviceError("a recording that was forgotten".into()))?;
        launches.iter().try_for_each(|launch| self.launch(launch))
    }

    fn forget(&mut self, recording: u64) {
        self.recordings.remove(&recording);
        self.on(|emulator| emulator.forget(recording));
    }
}
