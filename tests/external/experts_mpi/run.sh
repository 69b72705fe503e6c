#!/usr/bin/env bash
# MPI as an oracle of the exchanges between expert-parallel ranks: what MPI_Alltoallv delivers of the messages that ranks
# sent must be, byte for byte, what our transports delivered. MPICH and mpi4py come from PyPI into a temporary folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
here=$PWD
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
venv=${KEYWAY_MPI_VENV:-}
if [ -z "$venv" ]; then
    venv=$dir/venv
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q numpy mpich==5.0.2 mpi4py==4.1.2
fi
cargo build -q --manifest-path ../../../Cargo.toml -p keyway-kernels --example record_exchanges
record=${CARGO_TARGET_DIR:-../../../target}/debug/examples/record_exchanges

for ranks in 2 4 8; do
    mkdir "$dir/$ranks"
    "$record" "$dir/$ranks" "$ranks"
    "$venv/bin/mpiexec" -n "$ranks" "$venv/bin/python" "$here/oracle.py" "$dir/$ranks"
    # The oracle must tell messages of two ranks apart.
    if "$venv/bin/mpiexec" -n "$ranks" "$venv/bin/python" "$here/oracle.py" "$dir/$ranks" --swap >"$dir/swapped"; then
        echo "exchanged messages were not noticed" >&2
        exit 1
    fi
    echo "with two ranks' messages exchanged: $(sed 's/.*MPI_Alltoallv, //' "$dir/swapped")"
done
