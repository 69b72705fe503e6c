//! Msgpack as far as KV events need it: a reader over a slice that never recurses and never trusts a length,
//! and a writer into a vector. Knows values, not events.

use rmp::Marker;
use rmp::encode;

/// The bytes are not msgpack, or end too early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NotMsgpack;

/// One value; of an array or map only its head, whose elements follow.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Value<'a> {
    Nil,
    Bool,
    Uint(u64),
    /// An integer below zero. All others are [`Value::Uint`], in whichever size they came.
    Negative(i64),
    Float(f64),
    Text(&'a [u8]),
    Bytes(&'a [u8]),
    Array(u32),
    Map(u32),
    Extension,
}

/// Bytes of a value that begins with this one, where that alone says it: numbers, booleans and nil. 0
/// elsewhere.
const SIZES: [u8; 256] = {
    let mut sizes = [0; 256];
    let mut marker = 0;
    while marker < sizes.len() {
        sizes[marker] = match marker {
            0x00..=0x7F | 0xC0 | 0xC2 | 0xC3 | 0xE0..=0xFF => 1,
            0xCC | 0xD0 => 2,
            0xCD | 0xD1 => 3,
            0xCA | 0xCE | 0xD2 => 5,
            0xCB | 0xCF | 0xD3 => 9,
            _ => 0,
        };
        marker += 1;
    }
    sizes
};

/// Reads values one after the other.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// The bytes that are not read yet.
    pub(super) fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// Reads the next value. An extension is passed over, its bytes with it.
    pub(super) fn next(&mut self) -> Result<Value<'a>, NotMsgpack> {
        let marker = Marker::from_u8(self.bytes(1)?[0]);
        Ok(match marker {
            Marker::Null => Value::Nil,
            Marker::True | Marker::False => Value::Bool,
            Marker::FixPos(value) => Value::Uint(u64::from(value)),
            Marker::FixNeg(value) => Value::Negative(i64::from(value)),
            Marker::U8 => Value::Uint(self.uint(1)?),
            Marker::U16 => Value::Uint(self.uint(2)?),
            Marker::U32 => Value::Uint(self.uint(4)?),
            Marker::U64 => Value::Uint(self.uint(8)?),
            Marker::I8 => signed(i64::from(self.uint(1)? as i8)),
            Marker::I16 => signed(i64::from(self.uint(2)? as i16)),
            Marker::I32 => signed(i64::from(self.uint(4)? as i32)),
            Marker::I64 => signed(self.uint(8)? as i64),
            Marker::F32 => Value::Float(f64::from(f32::from_bits(self.uint(4)? as u32))),
            Marker::F64 => Value::Float(f64::from_bits(self.uint(8)?)),
            Marker::FixStr(len) => Value::Text(self.bytes(usize::from(len))?),
            Marker::Str8 => Value::Text(self.sized(1)?),
            Marker::Str16 => Value::Text(self.sized(2)?),
            Marker::Str32 => Value::Text(self.sized(4)?),
            Marker::Bin8 => Value::Bytes(self.sized(1)?),
            Marker::Bin16 => Value::Bytes(self.sized(2)?),
            Marker::Bin32 => Value::Bytes(self.sized(4)?),
            Marker::FixArray(len) => Value::Array(u32::from(len)),
            Marker::Array16 => Value::Array(self.uint(2)? as u32),
            Marker::Array32 => Value::Array(self.uint(4)? as u32),
            Marker::FixMap(len) => Value::Map(u32::from(len)),
            Marker::Map16 => Value::Map(self.uint(2)? as u32),
            Marker::Map32 => Value::Map(self.uint(4)? as u32),
            Marker::FixExt1 => self.extension(1)?,
            Marker::FixExt2 => self.extension(2)?,
            Marker::FixExt4 => self.extension(4)?,
            Marker::FixExt8 => self.extension(8)?,
            Marker::FixExt16 => self.extension(16)?,
            Marker::Ext8 => self.sized_extension(1)?,
            Marker::Ext16 => self.sized_extension(2)?,
            Marker::Ext32 => self.sized_extension(4)?,
            Marker::Reserved => return Err(NotMsgpack),
        })
    }

    /// The bytes of the next value, with all its elements. Counts what is outstanding instead of recursing,
    /// so depth costs nothing; a length that lies runs out of bytes.
    pub(super) fn whole(&mut self) -> Result<&'a [u8], NotMsgpack> {
        let start = self.rest;
        let mut outstanding = 1_u64;
        while outstanding > 0 {
            // Values whose first bytes say their sizes, as nearly all do: nothing but adding these up.
            let mut at = 0;
            while outstanding > 0
                && let Some(marker) = self.rest.get(at)
                && let size @ 1.. = SIZES[usize::from(*marker)]
            {
                (at, outstanding) = (at + usize::from(size), outstanding - 1);
            }
            self.rest = self.rest.get(at..).ok_or(NotMsgpack)?;
            if outstanding == 0 {
                break;
            }
            outstanding -= 1;
            match self.next()? {
                Value::Array(len) => outstanding += u64::from(len),
                Value::Map(len) => outstanding += 2 * u64::from(len),
                _ => {}
            }
        }
        Ok(&start[..start.len() - self.rest.len()])
    }

    /// The next value if it is a number, not below zero, with at least eight bytes behind its marker; else
    /// nothing is read. The same as [`Reader::next`], but without a branch for each size, which ids of mixed
    /// sizes would mispredict.
    pub(super) fn quick_uint(&mut self) -> Option<u64> {
        let (marker, bytes) = self.rest.split_first()?;
        let bytes = u64::from_be_bytes(*bytes.first_chunk()?);
        let size = SIZES[usize::from(*marker)];
        let value = match marker {
            0x00..=0x7F => u64::from(*marker),
            0xCC..=0xCF => bytes >> (72 - 8 * size),
            _ => return None,
        };
        self.rest = &self.rest[usize::from(size)..];
        Some(value)
    }

    /// Reads numbers into `ids`, as many as it has places and as long as [`Reader::quick_uint`] would read
    /// them and they fit. Returns how many.
    pub(super) fn quick_ids(&mut self, ids: &mut [u32]) -> usize {
        let (mut at, mut read) = (0, 0);
        for id in ids {
            let Some((marker, behind)) = self.rest.get(at..).and_then(<[u8]>::split_first) else { break };
            let Some(bytes) = behind.first_chunk() else { break };
            let size = SIZES[usize::from(*marker)];
            let value = match marker {
                0x00..=0x7F => u64::from(*marker),
                0xCC..=0xCF => u64::from_be_bytes(*bytes) >> (72 - 8 * size),
                _ => break,
            };
            let Ok(value) = u32::try_from(value) else { break };
            (*id, at, read) = (value, at + usize::from(size), read + 1);
        }
        self.rest = &self.rest[at..];
        read
    }

    fn bytes(&mut self, len: usize) -> Result<&'a [u8], NotMsgpack> {
        let (bytes, rest) = self.rest.split_at_checked(len).ok_or(NotMsgpack)?;
        self.rest = rest;
        Ok(bytes)
    }

    /// A big-endian number of `len` bytes, at most 8.
    #[inline(always)]
    fn uint(&mut self, len: usize) -> Result<u64, NotMsgpack> {
        Ok(self.bytes(len)?.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    /// Bytes behind their number, which takes `len` bytes.
    fn sized(&mut self, len: usize) -> Result<&'a [u8], NotMsgpack> {
        let size = self.uint(len)?;
        self.bytes(usize::try_from(size).map_err(|_| NotMsgpack)?)
    }

    fn extension(&mut self, len: usize) -> Result<Value<'a>, NotMsgpack> {
        self.bytes(1 + len)?;
        Ok(Value::Extension)
    }

    fn sized_extension(&mut self, len: usize) -> Result<Value<'a>, NotMsgpack> {
        let size = self.uint(len)?;
        self.extension(usize::try_from(size).map_err(|_| NotMsgpack)?)
    }
}

fn signed(value: i64) -> Value<'static> {
    u64::try_from(value).map_or(Value::Negative(value), Value::Uint)
}

/// Writes values one after the other, each in its shortest form. Writing to memory cannot fail, so `rmp`'s
/// results are dropped.
#[derive(Debug, Default)]
pub(super) struct Writer {
    pub(super) out: Vec<u8>,
}

impl Writer {
    pub(super) fn nil(&mut self) {
        let _ = encode::write_nil(&mut self.out);
    }

    pub(super) fn uint(&mut self, value: u64) {
        let _ = encode::write_uint(&mut self.out, value);
    }

    pub(super) fn int(&mut self, value: i64) {
        let _ = encode::write_sint(&mut self.out, value);
    }

    pub(super) fn float(&mut self, value: f64) {
        let _ = encode::write_f64(&mut self.out, value);
    }

    pub(super) fn text(&mut self, value: &str) {
        let _ = encode::write_str(&mut self.out, value);
    }

    pub(super) fn bytes(&mut self, value: &[u8]) {
        let _ = encode::write_bin(&mut self.out, value);
    }

    pub(super) fn array(&mut self, len: usize) {
        let _ = encode::write_array_len(&mut self.out, len as u32);
    }

    pub(super) fn map(&mut self, len: usize) {
        let _ = encode::write_map_len(&mut self.out, len as u32);
    }

    /// A value that is msgpack already.
    pub(super) fn raw(&mut self, value: &[u8]) {
        self.out.extend_from_slice(value);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Any bytes: what is read by size or at once is what is read value by value.
        #[test]
        fn shortcuts_read_the_same(
            marker in any::<u8>(),
            rest in prop::collection::vec(prop_oneof![any::<u8>(), 0xC0_u8..], 0..24),
        ) {
            let bytes = [&[marker][..], &rest].concat();
            let (mut quick, mut slow) = (Reader::new(&bytes), Reader::new(&bytes));
            match (quick.quick_uint(), slow.next()) {
                (Some(value), read) => {
                    prop_assert_eq!(read, Ok(Value::Uint(value)));
                    prop_assert_eq!(quick.rest, slow.rest);
                }
                (None, Ok(Value::Uint(_))) => {
                    // Signed markers hold numbers above zero too, and near the end there are too few bytes.
                    prop_assert!(rest.len() < 8 || (0xD0..=0xD3).contains(&marker));
                    prop_assert_eq!(quick.rest, &bytes[..]);
                }
                (None, _) => prop_assert_eq!(quick.rest, &bytes[..]),
            }
            let (mut quick, mut ids) = (Reader::new(&bytes), [0; 3]);
            let read = quick.quick_ids(&mut ids);
            let mut slow = Reader::new(&bytes);
            let expected = std::iter::from_fn(|| {
                let before = slow;
                let id = slow.quick_uint().and_then(|value| u32::try_from(value).ok());
                if id.is_none() {
                    slow = before;
                }
                id
            });
            prop_assert_eq!(&ids[..read], &expected.take(3).collect::<Vec<_>>()[..]);
            prop_assert_eq!(quick.rest, slow.rest);
            let one_by_one = |mut reader: Reader<'_>| {
                let mut outstanding = 1_u64;
                while outstanding > 0 {
                    outstanding -= 1;
                    match reader.next()? {
                        Value::Array(len) => outstanding += u64::from(len),
                        Value::Map(len) => outstanding += 2 * u64::from(len),
                        _ => {}
                    }
                }
                Ok(bytes.len() - reader.rest.len())
            };
            prop_assert_eq!(Reader::new(&bytes).whole().map(<[u8]>::len), one_by_one(Reader::new(&bytes)));
        }
    }
}
