//! Streams: every row once, the same as a matrix read at once, whatever the number of threads and the size of blocks.

use std::cell::Cell;

use proptest::prelude::*;
use qwill_device::Geometry;
use qwill_device::matrix::BLOCK_ROWS;
use qwill_weights::{Block, Checkpoint, Matrix, MatrixSpec, Quantize, StreamOptions, WeightsError, stream};
use serde_json::json;

use crate::builder::{Directory, Owned, micro_config, micro_tensors, repository};
use crate::golden::packed_directories;
use crate::tiny::matrices;

fn specs(geometry: &Geometry) -> Vec<MatrixSpec> {
    matrices(geometry).into_iter().map(|(name, rows, cols)| MatrixSpec { name, rows, cols }).collect()
}

/// Every block equals the rows of the matrix read at once.
fn assert_streams_whole_matrices(checkpoint: &Checkpoint, quantize: Quantize, options: StreamOptions) {
    let specs = specs(&checkpoint.config().geometry);
    let whole: Vec<Matrix> = specs
        .iter()
        .map(|spec| checkpoint.matrix(&spec.name, spec.rows, spec.cols, quantize).unwrap())
        .collect();
    let mut seen: Vec<Vec<bool>> = specs.iter().map(|spec| vec![false; spec.rows]).collect();
    let mut completed = 0;
    let mut place = |block: Block<'_>| -> Result<(), WeightsError> {
        let (spec, rows) = (&specs[block.matrix], block.first_row..block.first_row + block.data.rows);
        let whole = whole[block.matrix].data();
        let checked = block.data.check_block(whole.format(), spec.rows, spec.cols, block.first_row);
        assert_eq!(checked, Ok(()), "{}", spec.name);
        assert!(block.data == whole.block(rows.clone()), "{} rows {rows:?}", spec.name);
        for row in rows {
            assert!(!std::mem::replace(&mut seen[block.matrix][row], true), "{} row {row} twice", spec.name);
        }
        assert_eq!(block.completes, seen[block.matrix].iter().all(|seen| *seen));
        completed += usize::from(block.completes);
        Ok(())
    };
    stream(checkpoint, &specs, quantize, options, &mut place).unwrap();
    assert_eq!(completed, specs.len());
}

fn tiny() -> Checkpoint {
    Checkpoint::open(&repository("models/tiny")).unwrap()
}

#[test]
fn blocks_of_a_checkpoint_are_rows_of_its_matrices() {
    for quantize in [Quantize::None, Quantize::Int8, Quantize::Int4] {
        for (workers, block_bytes) in [(1, 1), (3, 40_000), (2, 1 << 30)] {
            assert_streams_whole_matrices(&tiny(), quantize, StreamOptions { workers, block_bytes });
        }
    }
}

#[test]
fn blocks_of_packed_directories_are_rows_of_their_matrices() {
    for directory in packed_directories() {
        let checkpoint = Checkpoint::open(directory.path()).unwrap();
        for (workers, block_bytes) in [(1, 1), (2, 60_000)] {
            assert_streams_whole_matrices(
                &checkpoint,
                Quantize::None,
                StreamOptions { workers, block_bytes },
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

    /// Random weights do not depend on the threads that make them.
    #[test]
    fn random_weights_are_the_same_in_any_blocks(workers in 1usize..6, block_bytes in 1usize..300_000, seed in any::<u64>()) {
        let geometry = Geometry::named("tiny").unwrap();
        for stored in [Quantize::None, Quantize::Int8, Quantize::Int4] {
            let checkpoint = Checkpoint::random(&geometry, seed, stored);
            assert_streams_whole_matrices(&checkpoint, Quantize::Int4, StreamOptions { workers, block_bytes });
        }
    }
}

#[test]
fn the_first_error_of_placing_ends_the_stream() {
    let checkpoint = tiny();
    let specs = specs(&checkpoint.config().geometry);
    for stop_at in [0, 5] {
        let placed = Cell::new(0);
        let mut place = |_: Block<'_>| {
            if placed.get() == stop_at {
                return Err(Stopped::Caller);
            }
            placed.set(placed.get() + 1);
            Ok(())
        };
        let options = StreamOptions { workers: 3, block_bytes: 1 };
        let stopped = stream(&checkpoint, &specs, Quantize::Int4, options, &mut place);
        assert!(matches!(stopped, Err(Stopped::Caller)), "{stopped:?}");
        assert_eq!(placed.get(), stop_at);
    }
}

#[derive(Debug)]
enum Stopped {
    Caller,
    Weights(WeightsError),
}
impl From<WeightsError> for Stopped {
    fn from(error: WeightsError) -> Self {
        Self::Weights(error)
    }
}

#[test]
fn an_error_of_reading_names_the_row_within_the_matrix() {
    let mut tensors = micro_tensors();
    let up = tensors.get_mut("model.layers.1.mlp.up_proj.weight").unwrap();
    let bad_row = BLOCK_ROWS + 7;
    up.bytes[(bad_row * 128 + 3) * 2..][..2].copy_from_slice(&half::bf16::NAN.to_le_bytes());
    let directory = Directory::single(&micro_config(), &tensors);
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    let specs = specs(&checkpoint.config().geometry);
    let options = StreamOptions { workers: 2, block_bytes: 1 };
    let stopped = stream(&checkpoint, &specs, Quantize::Int4, options, &mut |_| Ok::<(), Stopped>(()));
    let Err(Stopped::Weights(error)) = stopped else { panic!("{stopped:?}") };
    let message = error.to_string();
    assert!(message.contains("up_proj") && message.contains(&format!("row {bad_row},")), "{message}");
}

#[test]
fn a_file_that_becomes_shorter_is_an_error() {
    let directory = Directory::single(&micro_config(), &micro_tensors());
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    let file = std::fs::File::options().write(true).open(directory.path().join("model.safetensors")).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    let specs = specs(&checkpoint.config().geometry);
    let options = StreamOptions::default();
    let stopped = stream(&checkpoint, &specs, Quantize::None, options, &mut |_| Ok::<(), Stopped>(()));
    let Err(Stopped::Weights(error)) = stopped else { panic!("{stopped:?}") };
    assert!(error.to_string().contains("model.safetensors"), "{error}");
    assert!(error.hint().unwrap().contains("shorter"));
}

/// A zero point or scale beyond the first block is checked too.
#[test]
fn every_block_of_a_packed_matrix_is_checked() {
    let (rows, cols) = (256, 128);
    let mut config = micro_config();
    config["quantization_config"] = json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights":
            {"num_bits": 4, "type": "int", "symmetric": false, "strategy": "group", "group_size": 128}}}});
    for (part, word) in [("weight_zero_point", 9 + 5), ("weight_scale", 0)] {
        let mut tensors = micro_tensors();
        let name = |suffix: &str| format!("model.layers.1.mlp.up_proj.{suffix}");
        tensors.remove(&name("weight")).unwrap();
        tensors.insert(name("weight_packed"), Owned::words(&[rows, cols / 8], 0x1234_5678));
        tensors.insert(name("weight_zero_point"), Owned::words(&[rows / 8, 1], 0x8888_8888));
        tensors.insert(name("weight_scale"), Owned::f16(&[rows, 1], 0.01));
        let broken = tensors.get_mut(&name(part)).unwrap();
        if part == "weight_scale" {
            broken.bytes[2 * 200..2 * 200 + 2].copy_from_slice(&half::f16::INFINITY.to_le_bytes());
        } else {
            // Output 200 is the first nibble of word 25.
            broken.bytes[4 * 25] = 0x80 | (word as u8 & 15);
        }
        let directory = Directory::single(&config, &tensors);
        let checkpoint = Checkpoint::open(directory.path()).unwrap();
        let spec = [MatrixSpec { name: "layers.1.mlp.up_proj".to_owned(), rows, cols }];
        let options = StreamOptions { workers: 2, block_bytes: 1 };
        let stopped = stream(&checkpoint, &spec, Quantize::None, options, &mut |_| Ok::<(), Stopped>(()));
        let Err(Stopped::Weights(error)) = stopped else { panic!("{stopped:?}") };
        assert!(error.to_string().contains("at output 200, group 0"), "{error}");
    }
}
