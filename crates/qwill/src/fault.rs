//! Faults on purpose: how the whole server behaves when a device fails in mid-serving can only be seen by letting one
//! fail. The hidden flag `--fault` is for tests.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use qwill_device::sample::ScoreRow;
use qwill_device::{Batch, Device, DeviceError, SampleRow, Sampled};
use qwill_engine::StepModel;
use qwill_model::{Model, ModelError, MtpHidden};

/// `--fault KIND:STEP`: what happens, and in which step of the model, counting from 0 (the first two are the engine's
/// own test at start). Nothing drafts then, so that the number of a step says what has been generated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault {
    kind: Kind,
    step: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// This step fails, later ones work.
    Once,
    /// This step and all later ones fail.
    Lost,
    /// This step takes [`HANG`] longer.
    Hang,
    /// The model's thread panics.
    Panic,
    /// The device itself is broken by a kernel that reads from a wrong address; nothing happens without a GPU.
    Trap,
}

const KINDS: [(&str, Kind); 5] = [
    ("once", Kind::Once),
    ("lost", Kind::Lost),
    ("hang", Kind::Hang),
    ("panic", Kind::Panic),
    ("trap", Kind::Trap),
];

/// Long enough to be noticed, short enough to be survived.
const HANG: Duration = Duration::from_secs(8);

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "write once, lost, hang, panic or trap, a colon and the number of a step".to_owned();
        let (name, step) = text.split_once(':').ok_or_else(wrong)?;
        let (_, kind) = KINDS.iter().find(|(kind, _)| *kind == name).ok_or_else(wrong)?;
        Ok(Self { kind: *kind, step: step.parse().map_err(|_| wrong())? })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = KINDS.iter().find(|(_, kind)| *kind == self.kind).map_or("", |(name, _)| *name);
        write!(to, "{name}:{}", self.step)
    }
}

/// A model whose device fails.
pub(crate) struct Faulty<D: Device> {
    model: Model<D>,
    fault: Fault,
    steps: u64,
    break_device: fn(&mut D) -> Result<(), DeviceError>,
}

impl<D: Device> Faulty<D> {
    /// `break_device` is what [`Kind::Trap`] does.
    pub(crate) fn new(
        model: Model<D>,
        fault: Fault,
        break_device: fn(&mut D) -> Result<(), DeviceError>,
    ) -> Self {
        Self { model, fault, steps: 0, break_device }
    }

    /// Called at the start of every step.
    fn strike(&mut self) -> Result<(), ModelError> {
        let step = self.steps;
        self.steps += 1;
        let hit = step == self.fault.step;
        let failed = || {
            let device = "a device with --fault".to_owned();
            Err(DeviceError::Failed { op: "forward", device, reason: format!("step {step}") }.into())
        };
        match self.fault.kind {
            Kind::Once if hit => failed(),
            Kind::Lost if step >= self.fault.step => failed(),
            Kind::Hang if hit => {
                std::thread::sleep(HANG);
                Ok(())
            }
            Kind::Panic if hit => panic!("--fault {}", self.fault),
            Kind::Trap if hit => Ok((self.break_device)(self.model.device())?),
            _ => Ok(()),
        }
    }
}

impl<D: Device> StepModel for Faulty<D> {
    type Error = ModelError;

    fn forward(&mut self, batch: &Batch, logit_rows: &[usize]) -> Result<(), ModelError> {
        self.strike()?;
        self.model.forward(batch, logit_rows)
    }
    fn has_mtp(&self) -> bool {
        self.model.has_mtp()
    }
    fn mtp(&mut self, batch: &Batch, hidden: MtpHidden<'_>, logit_rows: &[usize]) -> Result<(), ModelError> {
        self.model.mtp(batch, hidden, logit_rows)
    }
    fn sample(&mut self, rows: &[SampleRow<'_>]) -> Result<Vec<Sampled>, ModelError> {
        self.model.sample(rows)
    }
    fn wait(&mut self) -> Result<(), ModelError> {
        self.model.wait()
    }
    fn score(&mut self, rows: &[ScoreRow]) -> Result<Vec<Sampled>, ModelError> {
        self.model.score(rows)
    }
    fn clear_slot(&mut self, slot: usize) -> Result<(), ModelError> {
        self.model.clear_slot(slot)
    }
    fn copy_slot(&mut self, from: usize, to: usize) -> Result<(), ModelError> {
        self.model.copy_slot(from, to)
    }
    fn copy_page(&mut self, from: usize, to: usize) -> Result<(), ModelError> {
        self.model.copy_page(from, to)
    }
    fn host_granules(&self) -> usize {
        self.model.host_granules()
    }
    fn state_granules(&self) -> usize {
        self.model.state_granules()
    }
    fn store_page(&mut self, page: usize, granule: u32) -> Result<(), ModelError> {
        self.model.store_page(page, granule)
    }
    fn load_page(&mut self, page: usize, granule: u32) -> Result<(), ModelError> {
        self.model.load_page(page, granule)
    }
    fn store_state(&mut self, slot: usize, position: usize, granules: &[u32]) -> Result<(), ModelError> {
        self.model.store_state(slot, position, granules)
    }
    fn load_state(&mut self, slot: usize, position: usize, granules: &[u32]) -> Result<(), ModelError> {
        self.model.load_state(slot, position, granules)
    }
    fn stored(&mut self) -> Result<bool, ModelError> {
        self.model.stored()
    }
    fn read_granule(&mut self, granule: u32) -> Result<&[u8], ModelError> {
        self.model.read_granule(granule)
    }
    fn write_granule(&mut self, granule: u32, bytes: &[u8]) -> Result<(), ModelError> {
        self.model.write_granule(granule, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_has_a_kind_and_a_step() {
        let fault: Fault = "lost:40".parse().unwrap();
        assert_eq!(fault, Fault { kind: Kind::Lost, step: 40 });
        assert_eq!(fault.to_string(), "lost:40");
        for text in ["", "lost", "lost:", "lost:-1", "found:3", ":3"] {
            assert!(text.parse::<Fault>().is_err(), "{text}");
        }
    }
}
