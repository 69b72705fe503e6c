//! The tensors of a Hugging Face checkpoint directory: `model.safetensors`, or the shards that
//! `model.safetensors.index.json` lists, or one that lies in the program. Files are mapped, not read: a
//! tensor is paged in when it is packed.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use super::ModelError;
use super::tensor::{Tensor, TensorSource, TensorType};
use crate::limits::LOAD_PROGRESS_EVERY;

/// An open checkpoint: its files, mapped or in the program itself, and where each tensor lies in them.
#[derive(Debug)]
pub(super) struct Checkpoint {
    files: Vec<Storage>,
    tensors: HashMap<String, Entry>,
    progress: Mutex<Progress>,
}

/// How far loading is.
#[derive(Debug)]
struct Progress {
    /// Bytes of the tensors that were asked for.
    read: usize,
    /// When the log was last told.
    told: Instant,
}

/// Where a file's bytes are.
#[derive(Debug)]
enum Storage {
    Mapped(Mmap),
    /// In the program itself.
    Embedded(&'static [u8]),
}

impl Storage {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Embedded(bytes) => bytes,
        }
    }
}

#[derive(Debug)]
struct Entry {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Range<usize>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

impl Checkpoint {
    /// Maps the files of `dir` and reads their headers.
    pub(super) fn open(dir: &Path) -> Result<Self, ModelError> {
        let mut checkpoint = Self::empty();
        for name in file_names(dir)? {
            let path = dir.join(name);
            let map = map(&path).map_err(|source| ModelError::Read { path: path.clone(), source })?;
            checkpoint.add(&path, Storage::Mapped(map))?;
        }
        Ok(checkpoint)
    }

    /// A safetensors file in the program itself; `name` is for messages.
    pub(super) fn embedded(name: &str, file: &'static [u8]) -> Result<Self, ModelError> {
        let mut checkpoint = Self::empty();
        checkpoint.add(Path::new(name), Storage::Embedded(file))?;
        Ok(checkpoint)
    }

    fn empty() -> Self {
        let progress = Mutex::new(Progress { read: 0, told: Instant::now() });
        Self { files: Vec::new(), tensors: HashMap::new(), progress }
    }

    /// Tells the log now and then how much of a large checkpoint has been read.
    fn tell(&self, bytes: usize) {
        // Poisoned or not, it is only a number for people.
        let mut progress = self.progress.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if progress.told.elapsed() >= LOAD_PROGRESS_EVERY {
            let all: usize = self.tensors.values().map(|entry| entry.bytes.len()).sum();
            let gb = |bytes: usize| format!("{:.1}", bytes as f64 / 1e9);
            let percent = progress.read.saturating_mul(100) / all.max(1);
            tracing::info!("loading weights: {} of {} GB, {percent} %", gb(progress.read), gb(all));
            progress.told = Instant::now();
        }
        progress.read = progress.read.saturating_add(bytes);
    }

    fn add(&mut self, path: &Path, file: Storage) -> Result<(), ModelError> {
        let read = SafeTensors::read_metadata(file.bytes());
        let (header, metadata) = read.map_err(|e| ModelError::Malformed {
            path: path.into(),
            reason: format!("not a complete safetensors file: {e}"),
        })?;
        // Offsets count from behind the header and its eight bytes of length; the parser has checked them.
        let data = header + 8;
        for (name, info) in metadata.tensors() {
            let bytes = data + info.data_offsets.0..data + info.data_offsets.1;
            let entry = Entry { file: self.files.len(), dtype: info.dtype, shape: info.shape.clone(), bytes };
            self.tensors.insert(name, entry);
        }
        self.files.push(file);
        Ok(())
    }
}

impl TensorSource for Checkpoint {
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, ModelError> {
        let Some(entry) = self.tensors.get(name) else {
            return Err(ModelError::MissingTensor { name: name.into(), shape: shape.into() });
        };
        if entry.shape != shape {
            let found = entry.shape.clone();
            return Err(ModelError::TensorShape { name: name.into(), found, expected: shape.into() });
        }
        let kind = match entry.dtype {
            Dtype::F32 => TensorType::F32,
            Dtype::F16 => TensorType::F16,
            Dtype::BF16 => TensorType::Bf16,
            Dtype::F8_E4M3 => TensorType::F8E4M3,
            Dtype::U8 => TensorType::U8,
            other => {
                return Err(ModelError::TensorType { name: name.into(), dtype: format!("{other:?}") });
            }
        };
        self.tell(entry.bytes.len());
        let bytes = Cow::Borrowed(&self.files[entry.file].bytes()[entry.bytes.clone()]);
        Ok(Tensor { kind, width: shape.last().copied().unwrap_or(1), bytes })
    }
}

#[allow(unsafe_code)]
fn map(path: &Path) -> std::io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: the mapping is read only while the model is loaded; as with every engine that maps weights, the
    // operator must not truncate or rewrite a checkpoint during that time.
    unsafe { Mmap::map(&file) }
}

/// Names of the weight files in `dir`.
fn file_names(dir: &Path) -> Result<BTreeSet<String>, ModelError> {
    const SINGLE: &str = "model.safetensors";
    if dir.join(SINGLE).exists() {
        return Ok(BTreeSet::from([SINGLE.into()]));
    }
    let path = dir.join("model.safetensors.index.json");
    let malformed = |reason: String| ModelError::Malformed { path: path.clone(), reason };
    if !path.exists() {
        let reason =
            format!("found neither {SINGLE} nor model.safetensors.index.json; only safetensors are read");
        return Err(ModelError::Malformed { path: dir.into(), reason });
    }
    let text = fs::read(&path).map_err(|source| ModelError::Read { path: path.clone(), source })?;
    let index: Index = serde_json::from_slice(&text).map_err(|e| malformed(e.to_string()))?;
    let names: BTreeSet<String> = index.weight_map.into_values().collect();
    match names.iter().find(|name| Path::new(name).file_name() != Some(name.as_ref())) {
        Some(name) => {
            Err(malformed(format!("`{name}` is not a file name in the checkpoint's own directory")))
        }
        None => Ok(names),
    }
}
