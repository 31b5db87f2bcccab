//! Every environment variable that Qwill reads. A flag on the command line wins over its variable.

macro_rules! variables {
    ($($name:ident = $value:literal),* $(,)?) => {
        $(pub(crate) const $name: &str = $value;)*
        /// All of them, for the test that the reference page is complete.
        #[cfg(test)]
        pub(crate) const ALL: &[&str] = &[$($value),*];
    };
}

variables! {
    CHAT_TEMPLATE = "QWILL_CHAT_TEMPLATE",
    QUANTIZE = "QWILL_QUANTIZE",
    WEIGHT_CACHE = "QWILL_WEIGHT_CACHE",
    DEVICE = "QWILL_DEVICE",
    GPU_MEMORY = "QWILL_GPU_MEMORY",
    KERNEL_CACHE = "QWILL_KERNEL_CACHE",
    ACTIVATIONS = "QWILL_ACTIVATIONS",
    KV_TYPE = "QWILL_KV_TYPE",
    STATE_TYPE = "QWILL_STATE_TYPE",
    THREADS = "QWILL_THREADS",
    MEMORY = "QWILL_MEMORY",
    MAX_SEQUENCES = "QWILL_MAX_SEQUENCES",
    MAX_CONTEXT = "QWILL_MAX_CONTEXT",
    KV_TOKENS = "QWILL_KV_TOKENS",
    PREFILL_SLICE = "QWILL_PREFILL_SLICE",
    SPEC = "QWILL_SPEC",
    DRAFT_LEN = "QWILL_DRAFT_LEN",
    HOST_CACHE = "QWILL_HOST_CACHE",
    PREFIX_CACHE = "QWILL_PREFIX_CACHE",
    SNAPSHOT_TOKENS = "QWILL_SNAPSHOT_TOKENS",
    DISK_CACHE = "QWILL_DISK_CACHE",
    DISK_CACHE_SIZE = "QWILL_DISK_CACHE_SIZE",
    HOST = "QWILL_HOST",
    PORT = "QWILL_PORT",
    THINKING = "QWILL_THINKING",
    MAX_STALL_MS = "QWILL_MAX_STALL_MS",
    QUEUE = "QWILL_QUEUE",
    API_KEY = "QWILL_API_KEY",
    API_KEYS_FILE = "QWILL_API_KEYS_FILE",
    ADMIN_KEY = "QWILL_ADMIN_KEY",
    ALLOW_NO_KEY = "QWILL_ALLOW_NO_KEY",
    CORS_ORIGINS = "QWILL_CORS_ORIGINS",
    SERVED_NAME = "QWILL_SERVED_NAME",
    BODY_LIMIT = "QWILL_BODY_LIMIT",
    MAX_CONNECTIONS = "QWILL_MAX_CONNECTIONS",
    ALLOWED_HOST = "QWILL_ALLOWED_HOST",
    STRICT_PARAMS = "QWILL_STRICT_PARAMS",
    DRAIN_TIMEOUT = "QWILL_DRAIN_TIMEOUT",
    LOG_FORMAT = "QWILL_LOG_FORMAT",
    LOG_LEVEL = "QWILL_LOG_LEVEL",
}
