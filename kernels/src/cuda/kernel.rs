//! The kernels by name: each a value of a type, so that a launch can name none that is not there.

macro_rules! kernels {
    ($($module:ident { $($name:ident,)* })*) => {
        /// A kernel, spelled as in its `.cu` file.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[allow(non_camel_case_types, missing_docs, reason = "names of the `.cu` files, which say what they do")]
        pub enum Kernel {
            $($($name,)*)*
        }

        impl Kernel {
            /// All of them; `tests/constants.rs` compares them with the `.cu` files.
            pub const ALL: &[Self] = &[$($(Self::$name,)*)*];

            /// What its function is called.
            pub fn name(self) -> &'static str {
                match self {
                    $($(Self::$name => stringify!($name),)*)*
                }
            }

            /// The fatbin that holds it: `bin/MODULE.fatbin`.
            pub fn module(self) -> &'static str {
                match self {
                    $($(Self::$name => stringify!($module),)*)*
                }
            }
        }
    };
}

kernels! {
    attention {
        attention_64_bf16_16, attention_64_bf16_128, attention_64_fp8_16, attention_64_fp8_128,
        attention_128_bf16_16, attention_128_bf16_128, attention_128_fp8_16, attention_128_fp8_128,
        attention_latent_bf16_16, attention_latent_fp8_16, attention_128_bf16_16_carried,
        attention_128_bf16_128_carried, attention_merge,
    }
    attention_sm90 {
        attention_sm90_64_bf16, attention_sm90_64_bf16_apart, attention_sm90_128_bf16,
        attention_sm90_128_bf16_apart, attention_sm90_latent_bf16, attention_sm90_latent_bf16_apart,
    }
    elementwise {
        silu_mul, clamped_gate_mul,
    }
    gather {
        gather, gather_packed, fill_in,
    }
    matmul {
        matmul_bf16_16, matmul_bf16_64, matmul_bf16_128, matmul_int8_16, matmul_int8_64, matmul_int4_16,
        matmul_int4_64, matmul_fp8_16, matmul_fp8_64, matmul_mxfp4_16, matmul_mxfp4_64, matmul_reduce,
    }
    matmul_sm90 {
        matmul_sm90_64, matmul_sm90_128, matmul_sm90_256, matmul_sm90_192, matmul_sm90_256_whole,
        matmul_sm90_16, matmul_sm90_128_clustered, matmul_sm90_256_clustered, matmul_sm90_256_whole_clustered,
    }
    moe {
        moe_route, moe_group, moe_choose, moe_combine,
    }
    moe_product {
        moe_product_bf16_16, moe_product_bf16_64, moe_product_bf16_128, moe_product_int8_16,
        moe_product_int8_64, moe_product_int4_16, moe_product_int4_64, moe_product_fp8_16, moe_product_fp8_64,
        moe_product_mxfp4_16, moe_product_mxfp4_64, moe_product_pair_bf16, moe_product_pair_int8,
        moe_product_pair_int4, moe_product_pair_fp8, moe_product_pair_mxfp4,
    }
    moe_product_sm90 {
        moe_product_sm90_64, moe_product_sm90_128, moe_product_sm90_256, moe_product_sm90_256_whole,
        moe_product_sm90_16, moe_product_sm90_pair,
    }
    peer {
        peer_reset, peer_plan, peer_dispatch_send, peer_dispatch_receive, peer_combine_send,
        peer_combine_receive,
    }
    probe {
        copy, matrix_peak,
    }
    rms_norm {
        rms_norm, rms_norm_1, rms_norm_2, rms_norm_4,
    }
    rope {
        rope_write_bf16, rope_write_fp8, rope_heads_bf16, rope_heads_fp8,
    }
    rules {
        apply_rules,
    }
    sample {
        sample_peaks, sample, score,
    }
    emulate {
        write_later,
    }
}

impl Kernel {
    /// The kernel whose function is called so.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kernel| kernel.name() == name)
    }
}

impl std::fmt::Display for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
