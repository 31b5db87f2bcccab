//! What the tests on a GPU share: opening it, or saying why not.

use qwill_cuda::{CudaDevice, CudaOptions};

/// Opens a GPU; `None`, with the reason printed, where there is none and `QWILL_REQUIRE_GPU` is not set.
pub(crate) fn device(options: &CudaOptions) -> Option<CudaDevice> {
    match CudaDevice::new(options) {
        Ok(device) => Some(device),
        // Where a GPU must be, its absence is a failure.
        Err(error) if std::env::var_os("QWILL_REQUIRE_GPU").is_some() => panic!("{error}"),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}
