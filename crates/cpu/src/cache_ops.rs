//! The cache ops of [`qwill_device::Device`], which both devices here leave to their common [`crate::Cache`] and
//! [`crate::HostStore`].

/// The methods themselves, for an `impl Device` whose module has their types in scope.
macro_rules! cache_ops {
    () => {
        fn clear_slot(&mut self, cache: &mut Cache, slot: usize) -> Result<(), DeviceError> {
            cache.clear_slot(slot)
        }

        fn copy_slot(&mut self, cache: &mut Cache, from: usize, to: usize) -> Result<(), DeviceError> {
            cache.copy_slot(from, to)
        }

        fn copy_page(&mut self, cache: &mut Cache, from: usize, to: usize) -> Result<(), DeviceError> {
            cache.copy_page(from, to)
        }

        fn read_state(
            &mut self,
            cache: &Cache,
            gdn_layer: usize,
            slot: usize,
        ) -> Result<GdnState, DeviceError> {
            cache.read_state(gdn_layer, slot)
        }

        fn write_state(
            &mut self,
            cache: &mut Cache,
            gdn_layer: usize,
            slot: usize,
            state: &GdnState,
        ) -> Result<(), DeviceError> {
            cache.write_state(gdn_layer, slot, state)
        }

        fn read_page(&mut self, cache: &Cache, kv_layer: usize, page: usize) -> Result<KvPage, DeviceError> {
            cache.read_page(kv_layer, page)
        }

        fn write_page(
            &mut self,
            cache: &mut Cache,
            kv_layer: usize,
            page: usize,
            content: &KvPage,
        ) -> Result<(), DeviceError> {
            cache.write_page(kv_layer, page, content)
        }

        fn host_store(&mut self, spec: &CacheSpec, granules: usize) -> Result<HostStore, DeviceError> {
            Ok(HostStore::new(spec, granules))
        }

        fn host_staging_bytes(&self, _spec: &CacheSpec) -> u64 {
            0
        }

        fn store_page(
            &mut self,
            cache: &Cache,
            page: usize,
            store: &mut HostStore,
            granule: u32,
        ) -> Result<(), DeviceError> {
            cache.store_page(page, store, granule)
        }

        fn load_page(
            &mut self,
            cache: &mut Cache,
            page: usize,
            store: &HostStore,
            granule: u32,
        ) -> Result<(), DeviceError> {
            cache.load_page(page, store, granule)
        }

        fn store_state(
            &mut self,
            cache: &Cache,
            slot: usize,
            position: usize,
            store: &mut HostStore,
            granules: &[u32],
        ) -> Result<(), DeviceError> {
            cache.store_state(slot, position, store, granules)
        }

        fn load_state(
            &mut self,
            cache: &mut Cache,
            slot: usize,
            position: usize,
            store: &HostStore,
            granules: &[u32],
        ) -> Result<(), DeviceError> {
            cache.load_state(slot, position, store, granules)
        }

        fn stored(&mut self, _store: &HostStore) -> Result<bool, DeviceError> {
            Ok(true)
        }

        fn read_granule<'a>(&mut self, store: &'a HostStore, granule: u32) -> Result<&'a [u8], DeviceError> {
            store.read_granule(granule)
        }

        fn write_granule(
            &mut self,
            store: &mut HostStore,
            granule: u32,
            bytes: &[u8],
        ) -> Result<(), DeviceError> {
            store.write_granule(granule, bytes)
        }
    };
}
