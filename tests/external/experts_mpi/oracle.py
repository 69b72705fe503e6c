"""Moves the messages that ranks sent by MPI_Alltoallv, and compares what arrives with what our fabrics delivered.

    mpiexec -n RANKS python oracle.py DIR [--swap]

DIR holds the records of `kernels/examples/record_exchanges.rs`. With --swap, ranks 0 and 1 move each other's messages: the
comparison must fail, or it compares nothing.
"""

import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

WORDS = np.dtype("<u4")


def exchanges(path, size):
    """What one rank sent and received: (lengths sent, words sent, lengths received, words received)."""
    words, at = np.fromfile(path, WORDS), 0
    while at < len(words):
        sent, received = words[at : at + size].astype(int), words[at + size : at + 2 * size].astype(int)
        at += 2 * size
        out, at = words[at : at + sent.sum()], at + sent.sum()
        came, at = words[at : at + received.sum()], at + received.sum()
        yield sent, out, received, came


def starts(lengths):
    return np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(int)


def main():
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    folder, swap = Path(sys.argv[1]), "--swap" in sys.argv
    moved = different = messages = 0
    for transport in sorted({path.name.split("-")[0] for path in folder.glob("*.bin")}):
        own = list(exchanges(folder / f"{transport}-{rank}.bin", size))
        sent_by = list(exchanges(folder / f"{transport}-{1 - rank}.bin", size)) if swap and rank < 2 else own
        assert len(set(comm.allgather(len(own)))) == 1, "ranks took different numbers of exchanges"
        for (sent, out, _, _), (_, _, received, came) in zip(sent_by, own):
            # Lengths first, as MPI must know them: they are checked too.
            lengths = np.array(comm.alltoall([int(length) for length in sent]))
            arrived = np.zeros(lengths.sum(), WORDS)
            comm.Alltoallv(
                [np.ascontiguousarray(out), sent, starts(sent), MPI.UINT32_T],
                [arrived, lengths, starts(lengths), MPI.UINT32_T],
            )
            same = np.array_equal(lengths, received) and arrived.tobytes() == came.tobytes()
            different += not same
            moved += arrived.nbytes
            messages += int((lengths > 0).sum())
    moved, different, messages = (comm.allreduce(value) for value in (moved, different, messages))
    if rank == 0:
        print(f"{size} ranks: {messages} messages, {moved} bytes by MPI_Alltoallv, {different} exchanges differ")
    sys.exit(different > 0)


main()
