//! The forms in which a matrix can lie in a checkpoint: found by name, checked, read.

use std::ops::Range;

use qwill_device::numeric::{bf16_to_f32, f16_to_f32, f32_to_f16};
use qwill_device::{GROUP, WeightFormat};

use crate::error::{WeightsError, shape};
use crate::files::{Files, Tensor};
use crate::header::Dtype;
use crate::matrix::{Matrix, row_bytes};
use crate::memory::{Memory, numbers};
use crate::quantization::Quantization;
use crate::unpack::{field, sign_codes, transpose_scales, transpose_words};

/// A matrix `[rows, cols]` found in the files, its tensors' types and shapes checked but not their content.
pub(crate) struct Stored<'a> {
    rows: usize,
    cols: usize,
    form: Form<'a>,
}

enum Form<'a> {
    Dense(Tensor<'a>),
    Packed(Box<Packed<'a>>),
}

/// The tensors of a packed matrix.
struct Packed<'a> {
    codes: Tensor<'a>,
    scales: Tensor<'a>,
    /// 4 or 8.
    bits: usize,
    order: Order<'a>,
    /// Group of each input, when stored.
    groups: Option<Tensor<'a>>,
}

/// What differs between the packings.
enum Order<'a> {
    /// Words by input; zero points always stored, as they are or less one.
    Gptq { zeros: Tensor<'a>, true_zero_point: bool },
    /// Words by output; zero points stored only by asymmetric exporters.
    CompressedTensors { zeros: Option<Tensor<'a>>, shape: Option<Tensor<'a>> },
}

impl<'a> Stored<'a> {
    /// Finds a matrix by canonical module name. It is packed exactly if its packed tensor exists.
    pub(crate) fn find(
        files: &'a Files,
        quantization: Option<Quantization>,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Self, WeightsError> {
        let part = |suffix: &str| files.tensor(&format!("{name}.{suffix}"));
        if let Some(bias) = part("bias") {
            check_no_bias(bias)?;
        }
        let form = if let Some(codes) = part("weight_packed") {
            if quantization != Some(Quantization::CompressedTensors) {
                return Err(unexplained(codes, quantization, "compressed-tensors"));
            }
            let order =
                Order::CompressedTensors { zeros: part("weight_zero_point"), shape: part("weight_shape") };
            let scales = part("weight_scale").ok_or_else(|| missing(files, name, "weight_scale"))?;
            let bits = code_bits(codes, [rows, cols], 1)?;
            let groups = part("weight_g_idx");
            Form::Packed(Box::new(Packed { codes, scales, bits, order, groups }))
        } else if let Some(codes) = part("qweight") {
            let Some(Quantization::Gptq { true_zero_point }) = quantization else {
                return Err(unexplained(codes, quantization, "gptq or auto-round"));
            };
            let zeros = part("qzeros").ok_or_else(|| missing(files, name, "qzeros"))?;
            let scales = part("scales").ok_or_else(|| missing(files, name, "scales"))?;
            let bits = code_bits(codes, [cols, rows], 0)?;
            let order = Order::Gptq { zeros, true_zero_point };
            Form::Packed(Box::new(Packed { codes, scales, bits, order, groups: part("g_idx") }))
        } else if let Some(weight) = part("weight") {
            check_dense(weight, rows, cols)?;
            Form::Dense(weight)
        } else {
            let expected = format!("`{name}.weight` {} or a packed form of it", shape(&[rows, cols]));
            return Err(WeightsError::Missing { tensor: name.to_owned(), file: files.searched(), expected });
        };
        if let Form::Packed(packed) = &form {
            packed.check_scales(rows, cols)?;
        }
        Ok(Self { rows, cols, form })
    }

    /// The format as stored.
    pub(crate) fn format(&self) -> WeightFormat {
        match &self.form {
            Form::Dense(weight) => match weight.dtype {
                Dtype::F32 => WeightFormat::F32,
                Dtype::F16 => WeightFormat::F16,
                _ => WeightFormat::Bf16,
            },
            Form::Packed(packed) if packed.bits == 8 => WeightFormat::Int8,
            Form::Packed(_) => WeightFormat::Int4,
        }
    }

    /// Reads rows in the given format: the stored one, or int4 or int8 for a dense matrix. `range` begins at a multiple
    /// of [`qwill_device::matrix::BLOCK_ROWS`] and ends at one or with the matrix; `stored` is memory for bytes as they
    /// lie in the file.
    pub(crate) fn read_rows(
        &self,
        range: Range<usize>,
        format: WeightFormat,
        stored: &mut Memory,
        out: &mut Matrix,
    ) -> Result<(), WeightsError> {
        out.reshape(format, range.len(), self.cols);
        match &self.form {
            Form::Dense(weight) => self.read_dense(*weight, range, stored, out),
            Form::Packed(packed) => packed.read_rows(self.rows, self.cols, range, stored, out),
        }
    }

    fn read_dense(
        &self,
        weight: Tensor<'_>,
        range: Range<usize>,
        stored: &mut Memory,
        out: &mut Matrix,
    ) -> Result<(), WeightsError> {
        let format = self.format();
        let row_bytes = row_bytes(format, self.cols);
        let same = out.format() == format;
        let into = if same { &mut out.elements } else { &mut *stored };
        into.resize(range.len() * row_bytes);
        weight.read_at(range.start * row_bytes, into.bytes_mut())?;
        into.make_native(if format == WeightFormat::F32 { 4 } else { 2 });
        if same {
            return Ok(());
        }
        out.round(format, stored).map_err(|(row, columns)| {
            let found = format!(
                "NaN, infinity or too large a number for {} in row {}, columns from {}",
                out.format().name(),
                range.start + row,
                columns.start
            );
            weight.fault("value", found, "finite weights")
        })
    }
}

impl Packed<'_> {
    /// Type and shape of scales and zero points.
    fn check_scales(&self, rows: usize, cols: usize) -> Result<(), WeightsError> {
        let groups = cols.div_ceil(GROUP);
        let by_input = matches!(self.order, Order::Gptq { .. });
        let expected = if by_input { [groups, rows] } else { [rows, groups] };
        if !matches!(self.scales.dtype, Dtype::F16 | Dtype::Bf16) {
            return Err(self.scales.fault("dtype", self.scales.dtype.name(), "F16 or BF16"));
        }
        if self.scales.shape != expected {
            // The same number of outputs and another number of groups is another group size.
            let [outputs_at, groups_at] = if by_input { [1, 0] } else { [0, 1] };
            return Err(match self.scales.shape {
                [_, _] if self.scales.shape[outputs_at] == rows && self.scales.shape[groups_at] > 0 => {
                    let found = cols.div_ceil(self.scales.shape[groups_at]);
                    let found = format!("{found} (scales {})", shape(self.scales.shape));
                    let expected = format!("{GROUP} (scales {})", shape(&expected));
                    self.scales.fault("group size", found, expected)
                }
                _ => self.scales.fault("shape", shape(self.scales.shape), shape(&expected)),
            });
        }
        match &self.order {
            Order::Gptq { zeros, .. } => expect_i32(*zeros, &[groups, rows * self.bits / 32]),
            Order::CompressedTensors { zeros, shape: stored } => {
                if let Some(stored) = stored {
                    check_stored_shape(*stored, rows, cols)?;
                }
                zeros.map_or(Ok(()), |zeros| expect_i32(zeros, &[(rows * self.bits).div_ceil(32), groups]))
            }
        }
    }

    /// Reads rows; see [`Stored::read_rows`].
    fn read_rows(
        &self,
        rows: usize,
        cols: usize,
        range: Range<usize>,
        stored: &mut Memory,
        out: &mut Matrix,
    ) -> Result<(), WeightsError> {
        if range.start == 0 {
            self.check_groups(cols)?;
        }
        let groups = cols.div_ceil(GROUP);
        self.check_zero_points(rows, groups, &range, stored)?;
        match self.order {
            Order::Gptq { .. } => {
                let (words, outputs) = (cols * self.bits / 32, range.len());
                stored.resize(words * outputs * 4);
                let columns = range.start * 4..range.end * 4;
                self.codes.read_columns(rows * 4, columns, stored.bytes_mut())?;
                stored.make_native(4);
                transpose_words(stored.numbers(), words, outputs, out.elements.bytes_mut());
                stored.resize(groups * outputs * 2);
                let columns = range.start * 2..range.end * 2;
                self.scales.read_columns(rows * 2, columns, stored.bytes_mut())?;
                stored.make_native(2);
                transpose_scales(stored.numbers(), outputs, out.scales.numbers_mut());
            }
            Order::CompressedTensors { .. } => {
                self.codes.read_at(range.start * cols * self.bits / 8, out.elements.bytes_mut())?;
                self.scales.read_at(range.start * groups * 2, out.scales.bytes_mut())?;
                out.scales.make_native(2);
            }
        }
        if self.bits == 8 {
            sign_codes(out.elements.bytes_mut());
        }
        self.check_scale_values(out.scales.numbers_mut(), range.start, groups)
    }

    /// Only the symmetric zero point 2^(bits−1): the device's formats have no other.
    fn check_zero_points(
        &self,
        rows: usize,
        groups: usize,
        range: &Range<usize>,
        stored: &mut Memory,
    ) -> Result<(), WeightsError> {
        let symmetric = 1u32 << (self.bits - 1);
        // Packed along the outputs: these words of each group, one group after another, hold the range.
        let words = range.start * self.bits / 32..(range.end * self.bits).div_ceil(32);
        let (zeros, less) = match self.order {
            Order::Gptq { zeros, true_zero_point } => {
                let width = rows * self.bits / 32;
                let words = words.start.min(width)..words.end.min(width);
                stored.resize(groups * words.len() * 4);
                zeros.read_columns(width * 4, words.start * 4..words.end * 4, stored.bytes_mut())?;
                (zeros, u32::from(!true_zero_point))
            }
            Order::CompressedTensors { zeros: Some(zeros), .. } => {
                stored.resize(words.len() * groups * 4);
                zeros.read_at(words.start * groups * 4, stored.bytes_mut())?;
                (zeros, 0)
            }
            Order::CompressedTensors { zeros: None, .. } => return Ok(()),
        };
        stored.make_native(4);
        let words = stored.numbers::<u32>();
        let width = words.len() / groups.max(1);
        for group in 0..groups {
            for row in 0..range.len() {
                let found = match self.order {
                    Order::Gptq { .. } => field(&words[group * width..(group + 1) * width], self.bits, row),
                    // One column per group.
                    Order::CompressedTensors { .. } => {
                        let bit = row * self.bits;
                        words[bit / 32 * groups + group] >> (bit % 32) & ((1 << self.bits) - 1)
                    }
                };
                if found + less != symmetric {
                    let row = range.start + row;
                    let found = format!("{} at output {row}, group {group} (asymmetric)", found + less);
                    let expected = format!("{symmetric} everywhere (symmetric quantisation)");
                    return Err(zeros.fault("zero point", found, expected));
                }
            }
        }
        Ok(())
    }

    /// Inputs grouped in order; activation order (`desc_act`) is refused.
    fn check_groups(&self, cols: usize) -> Result<(), WeightsError> {
        let Some(groups) = self.groups else { return Ok(()) };
        expect_i32(groups, &[cols])?;
        for (input, group) in numbers::<u32>(&groups.read()?).iter().enumerate() {
            if *group as usize != input / GROUP {
                let found = format!("group {group} at input {input} (activation order)");
                return Err(groups.fault("group index", found, format!("group {}", input / GROUP)));
            }
        }
        Ok(())
    }

    /// The stored scales of a block of rows as f16 bits.
    ///
    /// A bf16 scale of magnitude 2^-17 (7.6e-6) to 65504 is an f16 exactly, and exporters keep scales above
    /// 1e-5. A smaller one is rounded to the nearest f16: that moves a weight by at most 128 · 2^-25, less
    /// than 4e-6. One that f16 cannot hold, or that is not finite, is an error.
    fn check_scale_values(
        &self,
        scales: &mut [u16],
        first_row: usize,
        groups: usize,
    ) -> Result<(), WeightsError> {
        if *self.scales.dtype == Dtype::Bf16 {
            for bits in &mut *scales {
                *bits = f32_to_f16(bf16_to_f32(*bits));
            }
        }
        match scales.iter().position(|&bits| !f16_to_f32(bits).is_finite()) {
            None => Ok(()),
            Some(at) => {
                let (row, group) = (first_row + at / groups, at % groups);
                let found = format!("{} at output {row}, group {group}", f16_to_f32(scales[at]));
                Err(self.scales.fault("scale", found, "finite numbers up to 65504"))
            }
        }
    }
}

/// Bits per code from the packed shape. `logical` is the matrix's shape in stored order and `packed_dim` the
/// dimension that is packed.
fn code_bits(codes: Tensor, logical: [usize; 2], packed_dim: usize) -> Result<usize, WeightsError> {
    if *codes.dtype != Dtype::I32 {
        return Err(codes.fault("dtype", codes.dtype.name(), "I32 words of 4-bit or 8-bit codes"));
    }
    let other = 1 - packed_dim;
    let words = |bits: usize| (logical[packed_dim] * bits).div_ceil(32);
    let with = |bits: usize| {
        let mut shape = logical;
        shape[packed_dim] = words(bits);
        shape
    };
    let expected = || format!("{} (4 bits) or {} (8 bits)", shape(&with(4)), shape(&with(8)));
    let bits = match codes.shape {
        [_, _] if codes.shape[other] == logical[other] => {
            (1..=8).find(|&bits| words(bits) == codes.shape[packed_dim])
        }
        _ => None,
    };
    match bits {
        // A row of codes must end with its last word, or rows would need repacking.
        Some(bits @ (4 | 8)) if (logical[packed_dim] * bits).is_multiple_of(32) => Ok(bits),
        Some(4 | 8) => {
            Err(codes.fault("shape", shape(codes.shape), "a number of inputs that fills whole 32-bit words"))
        }
        Some(bits) => {
            let found = format!("{bits} (packed shape {})", shape(codes.shape));
            Err(codes.fault("bits per code", found, format!("4 or 8: {}", expected())))
        }
        None => Err(codes.fault("shape", shape(codes.shape), expected())),
    }
}

fn check_dense(weight: Tensor, rows: usize, cols: usize) -> Result<(), WeightsError> {
    if !matches!(weight.dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16) {
        let expected = "F32, F16 or BF16, or int4/int8 codes of GPTQ or compressed-tensors pack-quantized";
        return Err(weight.fault("dtype", weight.dtype.name(), expected));
    }
    if weight.shape != [rows, cols] {
        return Err(weight.fault("shape", shape(weight.shape), shape(&[rows, cols])));
    }
    Ok(())
}

/// Linear layers of the family have no bias; some exporters write one of zeros.
fn check_no_bias(bias: Tensor) -> Result<(), WeightsError> {
    if bias.read()?.iter().all(|&byte| byte == 0) {
        return Ok(());
    }
    Err(bias.fault("bias", format!("values other than zero {}", shape(bias.shape)), "no bias"))
}

fn check_stored_shape(stored: Tensor, rows: usize, cols: usize) -> Result<(), WeightsError> {
    let expected = [rows as i64, cols as i64];
    if *stored.dtype != Dtype::I64 {
        return Err(stored.fault("dtype", stored.dtype.name(), "I64"));
    }
    let bytes = stored.read()?;
    let found = numbers::<i64>(&bytes);
    if *found != expected {
        return Err(stored.fault("shape", format!("{found:?}"), format!("{expected:?}")));
    }
    Ok(())
}

fn expect_i32(tensor: Tensor, expected: &[usize]) -> Result<(), WeightsError> {
    if *tensor.dtype != Dtype::I32 {
        return Err(tensor.fault("dtype", tensor.dtype.name(), "I32"));
    }
    if tensor.shape != expected {
        return Err(tensor.fault("shape", shape(tensor.shape), shape(expected)));
    }
    Ok(())
}

fn missing(files: &Files, name: &str, suffix: &str) -> WeightsError {
    WeightsError::Missing {
        tensor: format!("{name}.{suffix}"),
        file: files.searched(),
        expected: "it beside the packed codes of that matrix".to_owned(),
    }
}

/// Packed codes that `config.json` does not explain.
fn unexplained(codes: Tensor, quantization: Option<Quantization>, wanted: &str) -> WeightsError {
    let found = match quantization {
        None => "no quantization_config in config.json",
        Some(Quantization::Gptq { .. }) => "a quantization_config of gptq or auto-round",
        Some(Quantization::CompressedTensors) => "a quantization_config of compressed-tensors",
    };
    codes.fault("packed codes", found, format!("a quantization_config of {wanted}"))
}
