//! Which device shall compute, as people write it.

use std::fmt;
use std::str::FromStr;

/// Which device computes a model, as `--device` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first NVIDIA GPU if there is one and it computes the model, else the CPU.
    Auto,
    /// SIMD on this machine's processor.
    Cpu,
    /// The NVIDIA GPU of this number, or nothing.
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || format!("`{text}` is no device; use auto, cpu, cuda or cuda:N");
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => {
                let number = text.strip_prefix("cuda:").and_then(|number| number.parse().ok());
                number.map(Self::Cuda).ok_or_else(unknown)
            }
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        for device in [DeviceChoice::Auto, DeviceChoice::Cpu, DeviceChoice::Cuda(3)] {
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        for text in ["gpu", "cuda:", "cuda:x", "CPU", ""] {
            let refusal = text.parse::<DeviceChoice>().unwrap_err();
            assert!(refusal.contains("use auto, cpu, cuda or cuda:N"), "{refusal}");
        }
    }
}
