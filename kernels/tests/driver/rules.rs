//! The driver's rules, kept by the stand-in and by `Gpu`; and what `Gpu` says where there is no driver that
//! will do.

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode, cudaError_enum as Code};
use cudarc::driver::{CudaContext, CudaStream, DriverError};
use keyway_kernels::cuda::gpu::Gpu;
use keyway_kernels::cuda::{Device, DeviceError, Kernel, Launch, Slice};

use crate::stand_in::{Report, StandIn};

/// Runs an inner test of this module; what the driver took note of.
fn report_of(name: &str, settings: &[(&str, &str)]) -> Option<Report> {
    Some(StandIn::new()?.run_test(&format!("rules::{name}"), settings))
}

/// The same, of what broke a rule.
fn inside(name: &str, settings: &[(&str, &str)]) -> Option<Vec<String>> {
    Some(report_of(name, settings)?.refused)
}

macro_rules! inner_tests {
    ($($name:ident),*) => {
        $(#[test] #[ignore = "runs where the driver is the stand-in"] fn $name() {
            if StandIn::is_here() {
                inner::$name();
            }
        })*
    };
}
inner_tests!(loads, launches, clusters, captures, gone_memory, refused, modules_fail, launches_fail);

#[test]
fn a_launch_gets_what_the_device_has_and_its_own_error() {
    for capability in ["80", "90"] {
        let Some(refused) = inside("launches", &[("CAPABILITY", capability)]) else { return };
        // One launch by itself and one that is recorded.
        assert_eq!(refused.len(), 2, "{refused:?}");
        assert!(refused.iter().all(|line| line.contains("no blocks")), "{refused:?}");
    }
    for capability in ["86", "89", "120"] {
        let Some(refused) = inside("launches", &[("CAPABILITY", capability)]) else { return };
        assert_eq!(refused.len(), 2, "{refused:?}");
    }
}

#[test]
fn a_launch_gets_its_clusters_or_the_reason_why_not() {
    let Some(refused) = inside("clusters", &[("CAPABILITY", "90")]) else { return };
    assert_eq!(refused.len(), 3, "{refused:?}");
    for (line, why) in refused.iter().zip(["whole clusters", "too many blocks", "no cluster"]) {
        assert!(line.starts_with("cuLaunchKernelEx: silu_mul") && line.contains(why), "{line}");
    }
    let Some(refused) = inside("clusters", &[("CAPABILITY", "89")]) else { return };
    assert!(refused[0].contains("no clusters on this device"), "{refused:?}");
}

/// Code that a driver has to compile first takes a minute, each time that a container starts.
#[test]
fn devices_up_to_blackwell_find_machine_code() {
    for (capability, expected) in [
        ("80", "sm_80"),
        ("86", "sm_80"),
        ("89", "sm_80"),
        ("90", "sm_90a"),
        ("100", "sm_100"),
        ("103", "sm_100"),
        ("110", "compute_80"),
        ("120", "sm_120"),
        ("121", "sm_120"),
    ] {
        let Some(report) = report_of("loads", &[("CAPABILITY", capability)]) else { return };
        assert!(report.refused.is_empty(), "{capability}: {:?}", report.refused);
        let fatbins = if expected == "sm_90a" { 15 } else { 12 };
        assert_eq!(report.code.len(), fatbins, "{capability}: {:?}", report.code);
        assert!(report.code.iter().all(|(_, code)| code == expected), "{capability}: {:?}", report.code);
    }
}

#[test]
fn a_capture_holds_what_it_may() {
    let Some(refused) = inside("captures", &[]) else { return };
    let said = |what: &str| refused.iter().any(|line| line.starts_with(what));
    for call in ["cuModuleLoadData", "cuMemAllocAsync", "cuStreamSynchronize", "cuStreamEndCapture"] {
        assert!(said(call), "{call}: {refused:?}");
    }
}

#[test]
fn a_recording_does_not_outlive_its_memory() {
    let Some(refused) = inside("gone_memory", &[]) else { return };
    assert!(refused.iter().any(|line| line.contains("memory that was freed")), "{refused:?}");
}

#[test]
fn a_driver_or_a_gpu_that_is_too_old_is_one_line() {
    let settings = [
        (
            "DRIVER_VERSION",
            "12040",
            "the NVIDIA driver is for CUDA 12.4, and the kernels need 13.0: take driver 580 or",
        ),
        ("CAPABILITY", "75", "has compute capability 7.5, and the kernels need 8.0: run with --device cpu"),
        ("DEVICES", "0", "no usable NVIDIA GPU 0"),
    ];
    for (name, value, line) in settings {
        let Some(refused) = inside("refused", &[(name, value), ("EXPECTED", line)]) else { return };
        assert!(refused.is_empty(), "{refused:?}");
    }
}

#[test]
fn failures_that_are_asked_for_happen() {
    if inside("modules_fail", &[("FAILING_MODULES", "222")]).is_none() {
        return;
    }
    for (code, name) in [("701", "LAUNCH_OUT_OF_RESOURCES"), ("719", "LAUNCH_FAILED")] {
        let settings = [("FAILING_LAUNCHES_FROM", "3"), ("LAUNCH_FAILURE", code), ("EXPECTED", name)];
        inside("launches_fail", &settings);
    }
}

/// A launch that adds nothing up: so many rows of SiLU·mul.
fn silu_mul(gpu: &mut dyn Device) -> Result<(Launch, Slice<u8>), DeviceError> {
    use keyway_kernels::cuda::elementwise::silu_mul;
    let (x, y) = (gpu.upload(&[half::bf16::ONE; 32])?, gpu.slice(16)?);
    Ok((silu_mul(x, 16, y).unwrap(), y.cast()))
}

mod inner {
    use super::*;

    pub(super) fn loads() {
        Gpu::new(0).unwrap().load_all().unwrap();
    }

    pub(super) fn launches() {
        let mut gpu = Gpu::new(0).unwrap();
        gpu.load_all().unwrap();
        let (mut launch, y) = silu_mul(&mut gpu).unwrap();
        let most = match gpu.generation().as_str() {
            "sm_80" => 163 << 10,
            "sm_90" => 227 << 10,
            _ => 99 << 10,
        };
        // A later launch may ask for more than an earlier one.
        for shared_bytes in [0, 50 << 10, 98 << 10, most] {
            launch.shared_bytes = shared_bytes;
            gpu.launch(&launch).unwrap();
        }
        launch.shared_bytes = most + 1;
        let error = gpu.launch(&launch).unwrap_err().to_string();
        assert!(error.contains(&format!("silu_mul needs {} bytes of shared memory", most + 1)), "{error}");
        assert!(error.contains(&format!("this GPU has {most}")), "{error}");
        launch.shared_bytes = 0;
        let no_such = Launch { kernel: Kernel::write_later, ..launch.clone() };
        assert!(gpu.launch(&no_such).unwrap_err().to_string().contains("no fatbin emulate"));
        let bad = Launch { grid: [0, 1, 1], ..launch.clone() };
        let own = |error: DeviceError| {
            let error = error.to_string();
            assert!(error.contains("silu_mul: ") && error.contains("CUDA_ERROR_INVALID_VALUE"), "{error}");
        };
        own(gpu.launch(&bad).unwrap_err());
        // Not that the capture was lost, which follows from it.
        own(gpu.record(&[launch.clone(), bad]).unwrap_err());
        let recording = gpu.record(&[launch]).unwrap();
        (&mut gpu as &mut dyn Device).overwrite(y, &[0xff; 32]).unwrap();
        gpu.replay(recording).unwrap();
        let found: Vec<u8> = (&mut gpu as &mut dyn Device).download(y).unwrap();
        assert!(found.chunks(2).all(|pair| pair != [0xff, 0xff]), "{found:?}");
        assert!(gpu.allocate(2 << 30).unwrap_err().to_string().contains("OUT_OF_MEMORY"));
    }

    pub(super) fn clusters() {
        let mut gpu = Gpu::new(0).unwrap();
        let (launch, _) = silu_mul(&mut gpu).unwrap();
        let has_clusters = gpu.has_warpgroups();
        let mut with = |grid: u32, cluster: u32| {
            gpu.launch(&Launch { grid: [grid, 1, 1], cluster, ..launch.clone() }).map_err(|e| e.to_string())
        };
        let refused = |result: Result<(), String>, code: &str| {
            let error = result.unwrap_err();
            assert!(error.contains("silu_mul: ") && error.contains(code), "{error}");
        };
        if has_clusters {
            with(6, 2).unwrap();
            with(8, 8).unwrap();
            refused(with(3, 2), "CUDA_ERROR_INVALID_VALUE");
            refused(with(18, 9), "CUDA_ERROR_INVALID_CLUSTER_SIZE");
            refused(with(2, 0), "CUDA_ERROR_INVALID_VALUE");
        } else {
            refused(with(6, 2), "CUDA_ERROR_NOT_SUPPORTED");
        }
    }

    pub(super) fn captures() {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let begin = || {
            stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        };
        let end =
            |stream: &std::sync::Arc<CudaStream>| stream.end_capture(CUgraphInstantiate_flags(0)).map(drop);
        let is = |result: Result<(), DriverError>, code: Code| assert_eq!(result.unwrap_err().0, code);
        begin();
        let ptx = cudarc::nvrtc::Ptx::from_binary(vec![0; 64]);
        is(context.load_module(ptx).map(drop), Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        is(end(&stream), Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        begin();
        is(stream.alloc_zeros::<u8>(8).map(drop), Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        is(end(&stream), Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        begin();
        is(stream.synchronize(), Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        is(end(&stream), Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        is(end(&stream), Code::CUDA_ERROR_ILLEGAL_STATE);
        begin();
        let other = std::sync::Arc::clone(&stream);
        let from_there = std::thread::spawn(move || end(&other)).join().unwrap();
        is(from_there, Code::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
        end(&stream).unwrap();
    }

    pub(super) fn gone_memory() {
        let mut gpu = Gpu::new(0).unwrap();
        let (launch, y) = silu_mul(&mut gpu).unwrap();
        let other = gpu.allocate(8).unwrap();
        let recording = gpu.record(&[launch]).unwrap();
        gpu.free(y.buffer);
        let replayed = gpu.replay(recording).and_then(|()| gpu.read(other, 0, &mut [0; 8]));
        assert!(replayed.unwrap_err().to_string().contains("ILLEGAL_ADDRESS"));
        // The context is lost with it.
        assert!(gpu.read(other, 0, &mut [0; 8]).is_err());
    }

    fn expected() -> String {
        std::env::var("STAND_IN_EXPECTED").unwrap()
    }

    pub(super) fn refused() {
        let line = Gpu::new(0).unwrap_err().to_string();
        assert!(line.contains(&expected()) && line.contains("--device cpu"), "{line}");
        assert_eq!(line.lines().count(), 1);
    }

    pub(super) fn modules_fail() {
        let error = Gpu::new(0).unwrap().load_all().unwrap_err().to_string();
        assert!(error.contains("attention.fatbin cannot be loaded"), "{error}");
        assert!(error.contains("UNSUPPORTED_PTX_VERSION"), "{error}");
    }

    pub(super) fn launches_fail() {
        let mut gpu = Gpu::new(0).unwrap();
        let (launch, y) = silu_mul(&mut gpu).unwrap();
        let mut step = || gpu.launch(&launch).and_then(|()| gpu.read(y.buffer, 0, &mut [0; 8]));
        step().and_then(|()| step()).unwrap();
        let error = step().unwrap_err().to_string();
        assert!(error.contains(&expected()), "{error}");
    }
}
