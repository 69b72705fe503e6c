//! How ranks in different processes tell each other where their mailboxes are: a handle from each to all,
//! over a [`Fabric`] of the host, with the layout that it is meant for. What a handle is, and how to open it,
//! is `gpu/ipc.rs`'s business.

use std::time::Duration;

use super::Layout;
use crate::fabric::{Cause, Fabric, FabricError, Phase};

/// Bytes of a handle of CUDA IPC (`CUipcMemHandle`).
pub const HANDLE_BYTES: usize = 64;
/// Words of a layout, before the handle's.
const LAYOUT_WORDS: usize = 5;

/// The handles of all ranks, by rank, one's own among them. Every rank has offered when it returns.
///
/// # Errors
/// Which rank failed, or has another layout in mind.
///
/// # Panics
/// If the group has not as many ranks as the layout.
pub fn exchange(
    fabric: &mut dyn Fabric,
    layout: &Layout,
    own: [u8; HANDLE_BYTES],
    deadline: Duration,
) -> Result<Vec<[u8; HANDLE_BYTES]>, FabricError> {
    let (rank, size) = (fabric.rank(), fabric.size());
    assert_eq!(layout.ranks, size, "peers: a layout of another number of ranks");
    let words: Vec<u32> = words_of(layout).into_iter().chain(own.chunks_exact(4).map(word)).collect();
    for to in (0..size).filter(|to| *to != rank) {
        fabric.outbox(to, words.len())?.copy_from_slice(&words);
    }
    fabric.exchange(Phase::Placement, deadline)?;
    let mut handles = Vec::with_capacity(size);
    for from in 0..size {
        if from == rank {
            handles.push(own);
            continue;
        }
        let offered = fabric.inbox(from);
        if offered.len() != words.len() || offered[..LAYOUT_WORDS] != words[..LAYOUT_WORDS] {
            let cause = Cause::Protocol("the sizes of another group");
            return Err(fabric.fail(from, Phase::Placement, cause));
        }
        let mut handle = [0; HANDLE_BYTES];
        for (bytes, word) in handle.chunks_exact_mut(4).zip(&offered[LAYOUT_WORDS..]) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        handles.push(handle);
    }
    Ok(handles)
}

fn words_of(layout: &Layout) -> [u32; LAYOUT_WORDS] {
    let Layout { ranks, held, tokens, top, width } = *layout;
    [ranks, held, tokens, top, width].map(|size| size as u32)
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::Local;
    use crate::fabric::tests::{each, groups};

    const PATIENCE: Duration = Duration::from_secs(30);
    const LAYOUT: Layout = Layout { ranks: 3, held: 4, tokens: 5, top: 2, width: 64 };

    fn handle(rank: usize) -> [u8; HANDLE_BYTES] {
        std::array::from_fn(|i| (rank * 67 + i * 5) as u8)
    }

    #[test]
    fn everybody_has_everybodys_handle_over_every_transport() {
        for (name, group) in groups(3, 64) {
            each(group, |mut fabric| {
                let own = handle(fabric.rank());
                let handles = exchange(&mut *fabric, &LAYOUT, own, PATIENCE).unwrap();
                assert_eq!(handles, [handle(0), handle(1), handle(2)], "{name}");
            });
        }
    }

    #[test]
    fn a_rank_with_other_sizes_is_named() {
        let group = Local::group(3, 64).into_iter().map(|rank| Box::new(rank) as Box<dyn Fabric>).collect();
        let errors = each(group, |mut fabric| {
            let rank = fabric.rank();
            let layout = Layout { tokens: if rank == 2 { 6 } else { 5 }, ..LAYOUT };
            (exchange(&mut *fabric, &layout, handle(rank), PATIENCE).unwrap_err(), fabric)
        });
        // For the odd one out all others are.
        let named: Vec<usize> = errors.iter().map(|(error, _)| error.rank).collect();
        assert_eq!(named, [2, 2, 0]);
        assert!(errors.iter().all(|(error, _)| error.phase == Phase::Placement));
    }
}
