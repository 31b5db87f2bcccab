//! The model's pages and states in host memory.

use qwill_device::{CacheSpec, Device, DeviceError};

use crate::{Model, ModelError};

/// The host store, and what it is for.
pub(crate) struct Host<D: Device> {
    store: D::HostStore,
    granules: usize,
    spec: CacheSpec,
}

impl<D: Device> Host<D> {
    /// `None` for no granules.
    pub(crate) fn new(device: &mut D, spec: &CacheSpec, granules: usize) -> Result<Option<Self>, ModelError> {
        if granules == 0 {
            return Ok(None);
        }
        let store = device.host_store(spec, granules)?;
        Ok(Some(Self { store, granules, spec: *spec }))
    }
}

/// The store, or why there is none.
fn store<'a, D: Device>(
    op: &'static str,
    host: &'a mut Option<Host<D>>,
) -> Result<&'a mut D::HostStore, ModelError> {
    let missing = || DeviceError::shape(op, "the model was loaded without a host store");
    Ok(host.as_mut().map(|host| &mut host.store).ok_or_else(missing)?)
}

impl<D: Device> Model<D> {
    /// Granules of the host store, which is none where the model was loaded without.
    pub fn host_granules(&self) -> usize {
        self.host.as_ref().map_or(0, |host| host.granules)
    }

    /// Granules that a stored state takes; a stored page takes one.
    pub fn state_granules(&self) -> usize {
        self.host.as_ref().map_or(0, |host| host.spec.state_granules())
    }

    /// Stores a page; see [`Device::store_page`].
    pub fn store_page(&mut self, page: usize, granule: u32) -> Result<(), ModelError> {
        let store = store("store_page", &mut self.host)?;
        Ok(self.device.store_page(&self.cache, page, store, granule)?)
    }

    /// Loads a page; see [`Device::load_page`].
    pub fn load_page(&mut self, page: usize, granule: u32) -> Result<(), ModelError> {
        let store = store("load_page", &mut self.host)?;
        Ok(self.device.load_page(&mut self.cache, page, store, granule)?)
    }

    /// Stores a state at a chunk's end; see [`Device::store_state`].
    pub fn store_state(&mut self, slot: usize, position: usize, granules: &[u32]) -> Result<(), ModelError> {
        let store = store("store_state", &mut self.host)?;
        Ok(self.device.store_state(&self.cache, slot, position, store, granules)?)
    }

    /// Loads a state; see [`Device::load_state`].
    pub fn load_state(&mut self, slot: usize, position: usize, granules: &[u32]) -> Result<(), ModelError> {
        let store = store("load_state", &mut self.host)?;
        Ok(self.device.load_state(&mut self.cache, slot, position, store, granules)?)
    }

    /// Whether everything that was stored and loaded so far is in its place; see [`Device::stored`].
    pub fn stored(&mut self) -> Result<bool, ModelError> {
        match &self.host {
            Some(host) => Ok(self.device.stored(&host.store)?),
            None => Ok(true),
        }
    }

    /// The bytes of a granule; see [`Device::read_granule`].
    pub fn read_granule(&mut self, granule: u32) -> Result<&[u8], ModelError> {
        let store = store("read_granule", &mut self.host)?;
        Ok(self.device.read_granule(store, granule)?)
    }

    /// Sets the bytes of a granule; see [`Device::write_granule`].
    pub fn write_granule(&mut self, granule: u32, bytes: &[u8]) -> Result<(), ModelError> {
        let store = store("write_granule", &mut self.host)?;
        Ok(self.device.write_granule(store, granule, bytes)?)
    }
}
