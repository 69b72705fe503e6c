//! The fatbins as a driver loads them, and their kernels, allowed all the shared memory that the device has
//! for a block: what a launch asks for may grow with its batch.

use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};

use super::failed;
use crate::cuda::{DeviceError, Kernel};

macro_rules! fatbins {
    ($($name:literal),*) => {
        &[$(($name, include_bytes!(concat!("../../../bin/", $name, ".fatbin")))),*]
    };
}
const FATBINS: &[(&str, &[u8])] = fatbins!(
    "attention",
    "attention_sm90",
    "elementwise",
    "gather",
    "matmul",
    "matmul_sm90",
    "moe",
    "moe_product",
    "moe_product_sm90",
    "peer",
    "probe",
    "rms_norm",
    "rope",
    "rules",
    "sample"
);
/// How the fatbins end that hold code for Hopper alone.
const HOPPER: &str = "_sm90";

/// A fatbin that the driver has loaded into a device's context; unloaded when this is dropped.
#[derive(Debug)]
struct Module {
    module: sys::CUmodule,
    context: Arc<CudaContext>,
}

/// A kernel of a loaded fatbin.
#[derive(Debug, Clone, Copy)]
pub(super) struct Function {
    pub(super) function: sys::CUfunction,
    /// Dynamic shared memory that its blocks may ask for.
    pub(super) shared_bytes: u32,
}

// SAFETY: the driver's modules and functions belong to no thread.
unsafe impl Send for Module {}
// SAFETY: the same.
unsafe impl Send for Function {}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: nothing that was launched from it runs any more: a `Gpu` waits before it drops its
            // modules.
            let _ = unsafe { result::module::unload(self.module) };
        }
    }
}

/// The modules of one device that were loaded.
#[derive(Debug, Default)]
pub(super) struct Modules {
    loaded: HashMap<&'static str, Module>,
    kernels: HashMap<Kernel, Function>,
}

impl Modules {
    /// Loads whatever the device has code for: code for Hopper only if it `is_hopper`.
    pub(super) fn load_all(
        &mut self,
        context: &Arc<CudaContext>,
        is_hopper: bool,
    ) -> Result<(), DeviceError> {
        let suits = |name: &&str| is_hopper || !name.ends_with(HOPPER);
        FATBINS.iter().map(|(name, _)| *name).filter(suits).try_for_each(|name| self.load(context, name))
    }

    /// A kernel, whose module is loaded if need be; `context` must be the thread's.
    pub(super) fn kernel(
        &mut self,
        context: &Arc<CudaContext>,
        kernel: Kernel,
    ) -> Result<Function, DeviceError> {
        let module = kernel.module();
        self.load(context, module)?;
        let function = self.kernels.get(&kernel).copied();
        function.ok_or_else(|| DeviceError(format!("{module}.fatbin has no kernel {kernel}")))
    }

    fn load(&mut self, context: &Arc<CudaContext>, name: &'static str) -> Result<(), DeviceError> {
        if self.loaded.contains_key(name) {
            return Ok(());
        }
        let Some((_, image)) = FATBINS.iter().find(|(fatbin, _)| *fatbin == name) else {
            return Err(DeviceError(format!("no fatbin {name}")));
        };
        let cannot = |e| DeviceError(format!("the kernels of {name}.fatbin cannot be loaded: {e:?}"));
        // SAFETY: a fatbin says itself how long it is.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }.map_err(cannot)?;
        let module = Module { module, context: Arc::clone(context) };
        let most = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let most = context.attribute(most).map_err(failed)?;
        for function in module.functions().map_err(cannot)? {
            let (name, function) = prepare(function, most).map_err(cannot)?;
            self.kernels.extend(Kernel::named(&name).map(|kernel| (kernel, function)));
        }
        self.loaded.insert(name, module);
        Ok(())
    }
}

impl Module {
    fn functions(&self) -> Result<Vec<sys::CUfunction>, result::DriverError> {
        let mut count = 0;
        // SAFETY: the module is loaded, and the driver writes one number.
        unsafe { sys::cuModuleGetFunctionCount(&raw mut count, self.module) }.result()?;
        let mut functions = vec![ptr::null_mut(); count as usize];
        // SAFETY: there is room for `count` functions.
        unsafe { sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, self.module) }.result()?;
        Ok(functions)
    }
}

/// Has the driver finish a kernel now rather than at its first launch, and allows it what shared memory there
/// is.
fn prepare(function: sys::CUfunction, most: i32) -> Result<(String, Function), result::DriverError> {
    use sys::CUfunction_attribute_enum as Attribute;
    let mut name: *const c_char = ptr::null();
    let mut own = 0;
    // SAFETY: the function is one of a loaded module's; the driver writes an address and a number, the name
    // lives as long as the module, and is copied.
    let name = unsafe {
        sys::cuFuncLoad(function).result()?;
        sys::cuFuncGetName(&raw mut name, function).result()?;
        sys::cuFuncGetAttribute(&raw mut own, Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
            .result()?;
        CStr::from_ptr(name).to_string_lossy().into_owned()
    };
    let dynamic = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: the same.
    let allow = |bytes| unsafe { sys::cuFuncSetAttribute(function, dynamic, bytes) }.result();
    // Code from 9.0 on counts as its own a kilobyte that the system takes beside what blocks may ask for.
    let shared = allow(most).map(|()| most).or_else(|_| allow(most - own).map(|()| most - own))?;
    Ok((name, Function { function, shared_bytes: shared.max(0) as u32 }))
}
