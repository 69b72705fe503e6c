//! Signatures of tokens, verified by `ring`, as TLS is: a provider of cryptography for `jsonwebtoken`, which
//! brings none of its own here. Signs nothing, and knows no shared secrets: who can verify those can sign.

use jsonwebtoken::{
    Algorithm, DecodingKey, DecodingKeyKind,
    crypto::{CryptoProvider, JwtVerifier, KeyUtils},
    errors::{Error, ErrorKind},
    signature,
};
use ring::signature as by_ring;

/// Algorithms by which tokens may be signed (RFC 7518, section 3.1; RFC 8037).
pub(super) const ALGORITHMS: [Algorithm; 9] = [
    Algorithm::RS256,
    Algorithm::RS384,
    Algorithm::RS512,
    Algorithm::PS256,
    Algorithm::PS384,
    Algorithm::PS512,
    Algorithm::ES256,
    Algorithm::ES384,
    Algorithm::EdDSA,
];

static PROVIDER: CryptoProvider = CryptoProvider {
    signer_factory: |_, _| Err(ErrorKind::UnsupportedAlgorithm.into()),
    verifier_factory: |algorithm, key| {
        Ok(Box::new(Verifier { algorithm: *algorithm, how: How::of(*algorithm)?, key: key.clone() }))
    },
    // No key is made into a JWK here.
    key_utils: KeyUtils::new_unimplemented(),
};

/// Lets tokens be verified in this process. Once is enough, more do no harm.
pub(super) fn install() {
    // Refused where it is there already.
    let _ = PROVIDER.install_default();
}

enum How {
    Rsa(&'static by_ring::RsaParameters),
    Other(&'static dyn by_ring::VerificationAlgorithm),
}

struct Verifier {
    algorithm: Algorithm,
    how: How,
    key: DecodingKey,
}

impl How {
    fn of(algorithm: Algorithm) -> Result<Self, Error> {
        Ok(match algorithm {
            Algorithm::RS256 => Self::Rsa(&by_ring::RSA_PKCS1_2048_8192_SHA256),
            Algorithm::RS384 => Self::Rsa(&by_ring::RSA_PKCS1_2048_8192_SHA384),
            Algorithm::RS512 => Self::Rsa(&by_ring::RSA_PKCS1_2048_8192_SHA512),
            Algorithm::PS256 => Self::Rsa(&by_ring::RSA_PSS_2048_8192_SHA256),
            Algorithm::PS384 => Self::Rsa(&by_ring::RSA_PSS_2048_8192_SHA384),
            Algorithm::PS512 => Self::Rsa(&by_ring::RSA_PSS_2048_8192_SHA512),
            Algorithm::ES256 => Self::Other(&by_ring::ECDSA_P256_SHA256_FIXED),
            Algorithm::ES384 => Self::Other(&by_ring::ECDSA_P384_SHA384_FIXED),
            Algorithm::EdDSA => Self::Other(&by_ring::ED25519),
            _ => return Err(ErrorKind::UnsupportedAlgorithm.into()),
        })
    }
}

impl signature::Verifier<Vec<u8>> for Verifier {
    fn verify(&self, message: &[u8], signed: &Vec<u8>) -> Result<(), signature::Error> {
        let verified = match (&self.how, self.key.kind()) {
            (How::Rsa(how), DecodingKeyKind::RsaModulusExponent { n, e }) => {
                // Some issuers write zeros in front, which `ring` does not read.
                let (n, e) = (without_zeros(n), without_zeros(e));
                by_ring::RsaPublicKeyComponents { n, e }.verify(how, message, signed)
            }
            (How::Other(how), DecodingKeyKind::SecretOrDer(key)) => {
                by_ring::UnparsedPublicKey::new(*how, key).verify(message, signed)
            }
            // A key of another kind than the signature.
            _ => return Err(signature::Error::new()),
        };
        verified.map_err(|_| signature::Error::new())
    }
}

fn without_zeros(number: &[u8]) -> &[u8] {
    &number[number.iter().take_while(|byte| **byte == 0).count()..]
}

impl JwtVerifier for Verifier {
    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}
