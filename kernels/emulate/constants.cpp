// Prints `src/cuda/constants.rs`, for `kernels/build`.
#include "constants.h"

int main() { std::fputs(constants::source().c_str(), stdout); }
