//! What a device does: keep buffers, carry out launches. No operation, and no driver.

use std::fmt;
use std::marker::PhantomData;

use super::Kernel;

/// What kernels' buffers hold: a number of fixed size, little-endian in memory.
pub trait Element: Copy + Default + 'static {
    /// Appends the number's bytes, the lowest first, as buffers on a device have them.
    fn put(self, bytes: &mut Vec<u8>);
    /// From as many bytes as it has.
    fn get(bytes: &[u8]) -> Self;
}

macro_rules! element {
    ($($t:ty),*) => {$(
        impl Element for $t {
            fn put(self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_le_bytes());
            }
            fn get(bytes: &[u8]) -> Self {
                let mut own = [0; size_of::<Self>()];
                own.copy_from_slice(bytes);
                Self::from_le_bytes(own)
            }
        }
    )*};
}
element!(u8, i8, u32, i32, u64, f32, half::bf16);

/// A part of a buffer on a device, in elements. Not tied to the device's life: a launch that names a freed
/// buffer is refused.
#[derive(Debug)]
pub struct Slice<T> {
    /// The device's number of the buffer.
    pub buffer: u64,
    /// Where it begins in the buffer, in bytes.
    pub offset: u64,
    /// How many elements of `T` it has, not bytes.
    pub len: usize,
    of: PhantomData<T>,
}

impl<T> Clone for Slice<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Slice<T> {}

impl<T: Element> Slice<T> {
    /// `len` elements of `buffer` from byte `offset`.
    pub fn new(buffer: u64, offset: u64, len: usize) -> Self {
        Self { buffer, offset, len, of: PhantomData }
    }

    /// The same bytes as elements of another type.
    ///
    /// # Panics
    /// If they are not whole elements.
    pub fn cast<U: Element>(self) -> Slice<U> {
        let bytes = self.len * size_of::<T>();
        assert!(bytes.is_multiple_of(size_of::<U>()), "cuda: a slice of parts of elements");
        Slice::new(self.buffer, self.offset, bytes / size_of::<U>())
    }

    /// The elements from `first` on.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn starting_at(self, first: usize) -> Self {
        assert!(first <= self.len, "cuda: a slice has no element {first}");
        Self::new(self.buffer, self.offset + (first * size_of::<T>()) as u64, self.len - first)
    }

    /// `len` elements from `first` on.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    pub fn part(self, first: usize, len: usize) -> Self {
        assert!(first + len <= self.len, "cuda: a slice has no elements {first} to {}", first + len);
        Self::new(self.buffer, self.offset + (first * size_of::<T>()) as u64, len)
    }
}

/// An argument of a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Argument {
    /// The address of a buffer's byte.
    Pointer {
        /// The device's number of the buffer.
        buffer: u64,
        /// Which byte of that buffer it is, counted from 0.
        offset: u64,
    },
    /// A null pointer, for an optional slice that is absent.
    Null,
    /// A `uint32_t` that the kernel takes by value, such as a number of rows.
    U32(u32),
    /// A `float` that the kernel takes by value, such as a factor.
    F32(f32),
}

impl<T> From<Slice<T>> for Argument {
    fn from(slice: Slice<T>) -> Self {
        Self::Pointer { buffer: slice.buffer, offset: slice.offset }
    }
}
impl<T> From<Option<Slice<T>>> for Argument {
    fn from(slice: Option<Slice<T>>) -> Self {
        slice.map_or(Self::Null, Self::from)
    }
}
impl From<u32> for Argument {
    fn from(value: u32) -> Self {
        Self::U32(value)
    }
}
impl From<usize> for Argument {
    fn from(value: usize) -> Self {
        Self::U32(value as u32)
    }
}
impl From<f32> for Argument {
    fn from(value: f32) -> Self {
        Self::F32(value)
    }
}

/// A kernel to start: everything that a driver wants to know.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// The kernel that is launched.
    pub kernel: Kernel,
    /// How many blocks are started along x, y and z.
    pub grid: [u32; 3],
    /// How many blocks beside each other along x make a cluster, which runs at once; they divide the grid's
    /// blocks there. 1: each block is by itself, as on devices that know no clusters (before 9.0).
    pub cluster: u32,
    /// Threads per block, along x.
    pub threads: u32,
    /// Dynamic shared memory per block.
    pub shared_bytes: u32,
    /// In the kernel's order.
    pub arguments: Vec<Argument>,
}

/// Why a device did not do something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceError(pub String);

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
impl std::error::Error for DeviceError {}

/// Keeps buffers and carries out launches, in the order given.
pub trait Device {
    /// A new buffer of `bytes`, each 0xff (NaN in every format here), so that what no kernel wrote shows.
    fn allocate(&mut self, bytes: usize) -> Result<u64, DeviceError>;
    /// Gives a buffer back.
    fn free(&mut self, buffer: u64);
    /// The address of a buffer's first byte as kernels see it, for tables of addresses. It holds until the
    /// buffer is freed.
    fn address_of(&mut self, buffer: u64) -> Result<u64, DeviceError>;
    /// Copies to a buffer, from its byte `offset` on.
    fn write(&mut self, buffer: u64, offset: u64, bytes: &[u8]) -> Result<(), DeviceError>;
    /// Copies from a buffer, from its byte `offset` on; waits for what was launched before.
    fn read(&mut self, buffer: u64, offset: u64, bytes: &mut [u8]) -> Result<(), DeviceError>;
    /// Begins to copy bytes of a buffer back as they are once what was launched before is done, and waits for
    /// nothing; a number for [`Device::collect`]. What is launched afterwards may change the buffer.
    fn fetch(&mut self, buffer: u64, offset: u64, bytes: usize) -> Result<u64, DeviceError>;
    /// Waits for such a copy, and for nothing launched after it; its first bytes. Each can be collected once.
    fn collect(&mut self, fetch: u64, bytes: &mut [u8]) -> Result<(), DeviceError>;
    /// Marks this point in the order of launches, for devices that measure the time between two.
    fn mark(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
    /// Whether it has Hopper's matrix instructions (`matmul::Unit::Warpgroup`).
    fn has_warpgroups(&self) -> bool;
    /// What kind of device it is, such as `sm_90`: two of one kind give equal bits.
    fn generation(&self) -> String;
    /// Streaming multiprocessors: for how many blocks there is room at once. Speed alone.
    fn processors(&self) -> usize;
    /// Memory of the device that is not taken yet, in bytes.
    fn free_bytes(&self) -> Result<usize, DeviceError>;
    /// Makes the first `bytes` of a buffer 0.
    fn zero(&mut self, buffer: u64, bytes: usize) -> Result<(), DeviceError>;
    /// Starts a kernel behind those started before; it may still run when this returns.
    fn launch(&mut self, launch: &Launch) -> Result<(), DeviceError>;
    /// Records launches, so that all of them can be started at once; the recording's number. Starts none.
    /// Their buffers must stay where they are for as long as it is replayed.
    fn record(&mut self, launches: &[Launch]) -> Result<u64, DeviceError>;
    /// Starts what was recorded.
    fn replay(&mut self, recording: u64) -> Result<(), DeviceError>;
    /// Lets go of a recording: its number cannot be replayed any more.
    fn forget(&mut self, recording: u64);
}

impl dyn Device + '_ {
    /// A buffer of `len` elements.
    pub fn slice<T: Element>(&mut self, len: usize) -> Result<Slice<T>, DeviceError> {
        Ok(Slice::new(self.allocate(len * size_of::<T>())?, 0, len))
    }

    /// A buffer with these elements.
    pub fn upload<T: Element>(&mut self, elements: &[T]) -> Result<Slice<T>, DeviceError> {
        let slice = self.slice(elements.len())?;
        self.overwrite(slice, elements)?;
        Ok(slice)
    }

    /// Replaces the first elements of a slice.
    pub fn overwrite<T: Element>(&mut self, slice: Slice<T>, elements: &[T]) -> Result<(), DeviceError> {
        let mut bytes = Vec::with_capacity(size_of_val(elements));
        for element in elements {
            element.put(&mut bytes);
        }
        self.write(slice.buffer, slice.offset, &bytes)
    }

    /// Copies a slice's elements to the host; waits for what was launched before.
    pub fn download<T: Element>(&mut self, slice: Slice<T>) -> Result<Vec<T>, DeviceError> {
        let mut bytes = vec![0; slice.len * size_of::<T>()];
        self.read(slice.buffer, slice.offset, &mut bytes)?;
        Ok(bytes.chunks_exact(size_of::<T>()).map(T::get).collect())
    }
}
