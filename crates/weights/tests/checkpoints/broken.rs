//! Checkpoints broken in one place: the message says which tensor of which file, what was found and what was
//! expected.

use qwill_weights::{Checkpoint, Quantize, WeightsError};
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::builder::{Directory, Owned, Tensors, micro_config, micro_tensors, safetensors_file};
use crate::tiny::{matrices, vectors};

/// The matrix that most cases break.
pub(crate) const UP: &str = "model.layers.1.mlp.up_proj";

/// Opens a directory and reads every tensor.
pub(crate) fn read_all(directory: &Directory) -> Result<(), WeightsError> {
    let checkpoint = Checkpoint::open(directory.path())?;
    for (name, rows, cols) in matrices(&checkpoint.config().geometry) {
        checkpoint.matrix(&name, rows, cols, Quantize::Int4)?;
    }
    for (name, len) in vectors(&checkpoint.config().geometry) {
        checkpoint.vector(&name, len)?;
    }
    Ok(())
}

/// Reading fails with a message that holds the parts, and with a hint.
#[track_caller]
pub(crate) fn assert_message(case: &str, directory: &Directory, parts: &[&str]) {
    let Err(error) = read_all(directory) else { panic!("{case}: read without an error") };
    let message = error.to_string();
    for part in parts.iter().chain(&["found", "expected"]) {
        assert!(message.contains(part), "{case}: `{part}` in: {message}");
    }
    assert!(error.hint().is_some(), "{case}: a hint for: {message}");
}

/// A tensor's stored name; `UP.` stands for the matrix that most cases break.
fn stored_name(name: &str) -> String {
    name.strip_prefix("UP.").map_or_else(|| name.to_owned(), |part| format!("{UP}.{part}"))
}

/// Adds or replaces a tensor.
pub(crate) fn put(tensors: &mut Tensors, name: &str, tensor: Owned) {
    tensors.insert(stored_name(name), tensor);
}

/// Removes a tensor, which must be there.
pub(crate) fn cut(tensors: &mut Tensors, name: &str) {
    tensors.remove(&stored_name(name)).unwrap();
}

/// Sets one element of a bf16 tensor.
fn set_bf16(tensors: &mut Tensors, name: &str, at: usize, value: f32) {
    let bytes = half::bf16::from_f32(value).to_le_bytes();
    tensors.get_mut(name).unwrap().bytes[2 * at..2 * at + 2].copy_from_slice(&bytes);
}

#[test]
fn the_checkpoints_are_sound_before_they_are_broken() {
    let plain = micro_tensors();
    for directory in [Directory::single(&micro_config(), &plain), Directory::sharded(&micro_config(), &plain)]
    {
        read_all(&directory).unwrap();
    }
}

/// Case, change of the tensors, parts of the message.
pub(crate) type TensorCase = (&'static str, fn(&mut Tensors), &'static [&'static str]);

#[test]
fn wrong_dense_tensors_are_named() {
    let cases: &[TensorCase] = &[
        (
            "missing matrix",
            |t| cut(t, "UP.weight"),
            &["`layers.1.mlp.up_proj`", "model.safetensors", "nothing", "[256, 128]"],
        ),
        (
            "missing vector",
            |t| cut(t, "model.layers.0.linear_attn.A_log"),
            &["`layers.0.linear_attn.A_log`", "model.safetensors", "[2]"],
        ),
        ("missing head", |t| cut(t, "lm_head.weight"), &["`lm_head`", "model.safetensors", "[32, 128]"]),
        (
            "a part of the MTP module",
            |t| cut(t, "mtp.fc.weight"),
            &["`mtp.fc`", "model.safetensors", "[128, 256]"],
        ),
        (
            "transposed",
            |t| put(t, "UP.weight", Owned::bf16(&[128, 256])),
            &[
                "`model.layers.1.mlp.up_proj.weight` in model.safetensors",
                "shape",
                "[128, 256]",
                "[256, 128]",
            ],
        ),
        (
            "other vocabulary",
            |t| put(t, "model.embed_tokens.weight", Owned::bf16(&[33, 128])),
            &["`model.embed_tokens.weight` in model.safetensors", "[33, 128]", "[32, 128]"],
        ),
        (
            "other hidden size",
            |t| put(t, "model.norm.weight", Owned::bf16(&[64])),
            &["`model.norm.weight` in model.safetensors", "[64]", "[128]"],
        ),
        (
            "convolution",
            |t| put(t, "model.layers.0.linear_attn.conv1d.weight", Owned::bf16(&[4, 16])),
            &["conv1d.weight` in model.safetensors", "[4, 16]", "[16, 1, 4] or [16, 4]"],
        ),
        (
            "integer norm",
            |t| put(t, "model.norm.weight", Owned::words(&[128], 1)),
            &["`model.norm.weight` in model.safetensors", "dtype", "I32", "BF16"],
        ),
        (
            "fp8 matrix",
            |t| {
                put(
                    t,
                    "UP.weight",
                    Owned { dtype: Dtype::F8_E4M3, shape: vec![256, 128], bytes: vec![0; 256 * 128] },
                );
            },
            &["up_proj.weight` in model.safetensors", "F8_E4M3", "BF16"],
        ),
        (
            "NaN in a norm",
            |t| set_bf16(t, "model.norm.weight", 5, f32::NAN),
            &["`model.norm.weight` in model.safetensors", "NaN at element 5", "finite"],
        ),
        (
            "infinity in dt_bias",
            |t| set_bf16(t, "model.layers.0.linear_attn.dt_bias", 1, f32::INFINITY),
            &["dt_bias` in model.safetensors", "inf at element 1"],
        ),
        (
            "NaN in a matrix to be rounded",
            |t| set_bf16(t, &format!("{UP}.weight"), 3 * 128 + 9, f32::NAN),
            &["up_proj.weight` in model.safetensors", "row 3, columns from 0"],
        ),
        (
            "bias",
            |t| put(t, "UP.bias", Owned::bf16(&[256])),
            &["`model.layers.1.mlp.up_proj.bias` in model.safetensors", "no bias"],
        ),
        (
            "a layer too many",
            |t| put(t, "model.layers.2.input_layernorm.weight", Owned::bf16(&[128])),
            &["`model.layers.2.input_layernorm.weight` in model.safetensors", "layer 2", "2 layers"],
        ),
        (
            "two nestings",
            |t| put(t, "model.language_model.norm.weight", Owned::bf16(&[128])),
            &["`norm.weight` is stored twice", "model.safetensors"],
        ),
    ];
    for (case, change, parts) in cases {
        let mut tensors = micro_tensors();
        change(&mut tensors);
        assert_message(case, &Directory::single(&micro_config(), &tensors), parts);
    }
}

/// Case, change of a single-file directory, parts of the message.
type FileCase = (&'static str, fn(&Directory), &'static [&'static str]);

/// The weights with their header replaced.
fn with_header(directory: &Directory, change: impl Fn(String) -> String) {
    let bytes = directory.read("model.safetensors");
    let header_bytes = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let header = change(String::from_utf8(bytes[8..8 + header_bytes].to_vec()).unwrap());
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&bytes[8 + header_bytes..]);
    directory.write("model.safetensors", &file);
}

#[test]
fn damaged_files_are_named() {
    let cases: &[FileCase] = &[
        ("empty file", |d| d.write("model.safetensors", b""), &["model.safetensors", "0 bytes"]),
        (
            "header beyond the file",
            |d| d.write("model.safetensors", &[200, 0, 0, 0, 0, 0, 0, 0, b'{', b'}']),
            &["model.safetensors", "header length of 200 in a file of 10 bytes"],
        ),
        (
            "absurd header length",
            |d| d.write("model.safetensors", &[0xff; 64]),
            &["model.safetensors", "18446744073709551615", "at most 100000000"],
        ),
        (
            "header is no JSON",
            |d| with_header(d, |h| h.replacen('{', "[", 1)),
            &["model.safetensors", "does not parse"],
        ),
        (
            "truncated",
            |d| {
                let bytes = d.read("model.safetensors");
                d.write("model.safetensors", &bytes[..bytes.len() - 100]);
            },
            &["tensor `", "in model.safetensors", "truncated", "at least"],
        ),
        (
            "trailing bytes",
            |d| {
                let mut bytes = d.read("model.safetensors");
                bytes.push(0);
                d.write("model.safetensors", &bytes);
            },
            &["model.safetensors", "where the last tensor ends"],
        ),
        (
            "unknown dtype",
            |d| with_header(d, |h| h.replacen("BF16", "BF17", 1)),
            &["tensor `", "in model.safetensors", "BF17"],
        ),
        (
            "shape of text",
            |d| with_header(d, |h| h.replacen("[32,128]", "\"x\"", 1)),
            &["tensor `", "in model.safetensors", "header shape", "\"x\""],
        ),
        (
            "size against shape",
            |d| with_header(d, |h| h.replacen("[32,128]", "[32,127]", 1)),
            &["tensor `", "in model.safetensors", "data_offsets", "8128 bytes for BF16 [32, 127]"],
        ),
        (
            "overlapping",
            |d| with_header(d, |h| shift_first_nonzero_offsets(&h)),
            &["tensor `", "in model.safetensors", "overlapping bytes"],
        ),
        (
            "one name twice",
            |d| with_header(d, |h| h.replacen("mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding", 1)),
            &["`mtp.pre_fc_norm_embedding.weight` is stored twice", "model.safetensors"],
        ),
        (
            "a directory for a file",
            |d| {
                d.remove("model.safetensors");
                std::fs::create_dir(d.path().join("model.safetensors")).unwrap();
            },
            &[],
        ),
        (
            "two copies",
            |d| {
                let bytes = d.read("model.safetensors");
                d.write("copy.safetensors", &bytes);
            },
            &["stored twice", "copy.safetensors", "model.safetensors"],
        ),
        (
            "only a pickle",
            |d| {
                d.remove("model.safetensors");
                d.write("pytorch_model.bin", b"x");
            },
            &["no checkpoint", "pytorch_model.bin", "*.safetensors"],
        ),
        ("no config", |d| d.remove("config.json"), &["config.json"]),
    ];
    for (case, change, parts) in cases {
        let directory = Directory::single(&micro_config(), &micro_tensors());
        change(&directory);
        if *case == "a directory for a file" {
            let message = read_all(&directory).unwrap_err().to_string();
            assert!(message.contains("cannot read") && message.contains("not a regular file"), "{message}");
        } else {
            assert_message(case, &directory, parts);
        }
    }
}

/// Moves the first tensor that does not start at 0 back by two bytes.
fn shift_first_nonzero_offsets(header: &str) -> String {
    let mut json: Value = serde_json::from_str(header).unwrap();
    let entries = json.as_object_mut().unwrap();
    let second = entries
        .values_mut()
        .filter(|entry| entry["data_offsets"][0] != 0)
        .min_by_key(|entry| entry["data_offsets"][0].as_u64());
    let offsets = &mut second.unwrap()["data_offsets"];
    *offsets = json!([offsets[0].as_u64().unwrap() - 2, offsets[1].as_u64().unwrap() - 2]);
    json.to_string()
}

/// A change of a directory that may borrow its helpers.
type Change<'a> = &'a dyn Fn(&Directory);

#[test]
fn broken_indices_are_named() {
    const INDEX: &str = "model.safetensors.index.json";
    let edit = |directory: &Directory, change: &dyn Fn(&mut Value)| {
        let mut index: Value = serde_json::from_slice(&directory.read(INDEX)).unwrap();
        change(&mut index);
        directory.write(INDEX, index.to_string().as_bytes());
    };
    let cases: &[(&str, Change, &[&str])] = &[
        (
            "missing shard",
            &|d| d.remove("model-1.safetensors"),
            &[INDEX, "shard model-1.safetensors", "no such file", "tensor `"],
        ),
        (
            "tensor in no shard",
            &|d| edit(d, &|i| i["weight_map"]["model.ghost.weight"] = json!("model-0.safetensors")),
            &[INDEX, "`model.ghost.weight`", "in no shard", "it in model-0.safetensors"],
        ),
        (
            "tensor in another shard",
            &|d| {
                edit(d, &|i| {
                    let map = i["weight_map"].as_object_mut().unwrap();
                    let shard = map.values_mut().find(|s| *s == "model-0.safetensors").unwrap();
                    *shard = json!("model-1.safetensors");
                });
            },
            &[INDEX, "tensor `", "it in model-0.safetensors", "it in model-1.safetensors"],
        ),
        (
            "shard outside",
            &|d| edit(d, &|i| i["weight_map"]["lm_head.weight"] = json!("../model.safetensors")),
            &[INDEX, "`lm_head.weight`", "../model.safetensors"],
        ),
        (
            "shard is a number",
            &|d| edit(d, &|i| i["weight_map"]["lm_head.weight"] = json!(1)),
            &[INDEX, "`lm_head.weight`", "found 1"],
        ),
        ("no map", &|d| edit(d, &|i| *i = json!({})), &[INDEX, "weight_map"]),
    ];
    for (case, change, parts) in cases {
        let directory = Directory::sharded(&micro_config(), &micro_tensors());
        change(&directory);
        assert_message(case, &directory, parts);
    }
    let directory = Directory::sharded(&micro_config(), &micro_tensors());
    directory.write(INDEX, b"{\"weight_map\": {");
    let message = read_all(&directory).unwrap_err().to_string();
    assert!(message.starts_with(INDEX) && message.contains("line 1"), "{message}");
}

#[test]
fn json_errors_carry_the_file_and_the_place() {
    for file in ["config.json", "generation_config.json"] {
        let directory = Directory::single(&micro_config(), &micro_tensors());
        for content in [&b"{\n  \"hidden_size\": }"[..], b"[]", b"", b"\xff\xfe"] {
            directory.write(file, content);
            let message = read_all(&directory).unwrap_err().to_string();
            assert!(message.starts_with(file) && message.contains("line"), "{message}");
        }
        directory.write(file, "[".repeat(100_000).as_bytes());
        assert!(read_all(&directory).is_err());
    }
    let missing = Checkpoint::open(std::path::Path::new("/nonexistent/model")).unwrap_err();
    assert!(missing.to_string().contains("/nonexistent/model"), "{missing}");
}

#[test]
fn extra_files_beside_the_index_are_read() {
    // An exporter that leaves the MTP module alone and puts it into a file of its own.
    let (mtp, rest): (Tensors, Tensors) =
        micro_tensors().into_iter().partition(|(name, _)| name.starts_with("mtp."));
    let directory = Directory::sharded(&micro_config(), &rest);
    read_all(&directory).unwrap();
    let without = Checkpoint::open(directory.path()).unwrap();
    assert_eq!(without.config().geometry.mtp_layers, 0, "no MTP tensor: no MTP module");
    directory.write("model_extra_tensors.safetensors", &safetensors_file(&mtp));
    read_all(&directory).unwrap();
    let with = Checkpoint::open(directory.path()).unwrap();
    assert_eq!(with.config().geometry.mtp_layers, 1);
    assert!(with.has("mtp.fc"));
}

#[test]
fn an_unstated_tie_is_decided_by_the_tensors() {
    let mut config = micro_config();
    config.as_object_mut().unwrap().remove("tie_word_embeddings");
    let mut tensors = micro_tensors();
    let untied = Directory::single(&config, &tensors);
    assert!(!Checkpoint::open(untied.path()).unwrap().config().geometry.tied_head);
    tensors.remove("lm_head.weight");
    let tied = Directory::single(&config, &tensors);
    assert!(Checkpoint::open(tied.path()).unwrap().config().geometry.tied_head);
}

#[test]
fn a_truncated_file_is_to_be_fetched_again() {
    let directory = Directory::single(&micro_config(), &micro_tensors());
    let bytes = directory.read("model.safetensors");
    directory.write("model.safetensors", &bytes[..bytes.len() - 1]);
    let hint = read_all(&directory).unwrap_err().hint().unwrap();
    assert!(hint.contains("did not finish"), "{hint}");
}
