//! Mailboxes that other processes map, by CUDA IPC: on one GPU, or on GPUs that reach each other (NVLink,
//! PCIe). cudarc binds the calls in `driver::sys` and wraps none of them. A process cannot open its own
//! handle, so ranks that are threads of one process share an allocation instead ([`Mailboxes::in_one`]).
//!
//! A handle must name what `cuMemAlloc` gave: memory of a pool, as [`Gpu`]'s buffers are, has none.

use std::ffi::c_char;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, result, sys};

use super::{Gpu, failed};
use crate::cuda::DeviceError;
use crate::cuda::peer::{HANDLE_BYTES, Layout, Mailboxes, exchange_handles};
use crate::fabric::Fabric;

/// Memory of this process that others may map.
#[derive(Debug)]
struct Own {
    address: u64,
    context: Arc<CudaContext>,
}

/// Memory of another process, mapped here.
#[derive(Debug)]
struct Mapped {
    address: u64,
    context: Arc<CudaContext>,
}

/// The mailboxes of a group whose ranks are processes, this one's allocated here: handles go over `fabric`,
/// on which the ranks have the same numbers. Every rank must then make its `Peers`, and all must meet once
/// more, before the first launch.
///
/// # Errors
/// Which rank did not answer, or what the driver says.
///
/// # Panics
/// If the group has not as many ranks as the layout.
pub fn mailboxes(
    gpu: &Gpu,
    layout: Layout,
    fabric: &mut dyn Fabric,
    deadline: Duration,
) -> Result<Mailboxes, DeviceError> {
    layout.check()?;
    gpu.enter()?;
    let context = gpu.stream.context();
    let own = Own::new(context, layout.mailbox_bytes())?;
    let handles = exchange_handles(fabric, &layout, own.handle()?, deadline);
    let handles = handles.map_err(|error| DeviceError(error.to_string()))?;
    let (mut addresses, mut mapped) = (Vec::new(), Vec::new());
    for (rank, handle) in handles.into_iter().enumerate() {
        if rank == fabric.rank() {
            addresses.push(own.address);
            continue;
        }
        let opened = Mapped::open(context, handle);
        let opened =
            opened.map_err(|e| DeviceError(format!("the memory of rank {rank} cannot be mapped: {e}")))?;
        addresses.push(opened.address);
        mapped.push(opened);
    }
    Ok(Mailboxes::kept_by(layout, addresses, Box::new((own, mapped))))
}

impl Own {
    fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, DeviceError> {
        // SAFETY: the context is current; the memory is freed once, when this value goes.
        let address = unsafe { result::malloc_sync(bytes) }.map_err(failed)?;
        let own = Self { address, context: Arc::clone(context) };
        // SAFETY: the memory has as many bytes. Poison, so that what no kernel wrote shows.
        unsafe { result::memset_d8_sync(address, 0xff, bytes) }.map_err(failed)?;
        Ok(own)
    }

    fn handle(&self) -> Result<[u8; HANDLE_BYTES], DeviceError> {
        let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
        // SAFETY: the address is one that cuMemAlloc gave, and the handle is written before it is read.
        unsafe { sys::cuIpcGetMemHandle(&raw mut handle, self.address) }.result().map_err(failed)?;
        Ok(handle.reserved.map(|byte| byte.to_ne_bytes()[0]))
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // After an error there is nothing to free.
        if self.context.bind_to_thread().is_ok() && self.context.synchronize().is_ok() {
            // SAFETY: nothing that was launched here uses the memory any more, and it is freed this once.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

impl Mapped {
    fn open(context: &Arc<CudaContext>, handle: [u8; HANDLE_BYTES]) -> Result<Self, DeviceError> {
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| c_char::from_ne_bytes([byte])) };
        // Another GPU's memory becomes reachable where the two can be peers.
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: the context is current; the driver checks the handle and writes an address only if it
        // succeeds.
        unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, handle, flags) }.result().map_err(failed)?;
        Ok(Self { address, context: Arc::clone(context) })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() && self.context.synchronize().is_ok() {
            // SAFETY: nothing that was launched here uses the mapping any more, and it is closed this once.
            let _ = unsafe { sys::cuIpcCloseMemHandle(self.address) };
        }
    }
}
