//! Ops that look at one row alone.

use std::rc::Rc;

use super::outputs::{Closeness, Outputs, POISON, Tensor};
use super::weights::{FORMATS, HostMatrix};
use super::{Bench, Failure, OpRun, Part, Random};
use crate::{Activations, Batch, Chunk, Device, GdnShape, Phase, Precision, Span};

/// Row counts around the sizes at which devices change their ways.
pub(super) const ROW_COUNTS: [usize; 12] = [1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 130];

/// Rows in a buffer beyond those that an op is told about; they must stay as they are.
const SPARE_ROWS: usize = 3;

/// A buffer of activations holding `values`, with poisoned spare rows.
pub(super) fn upload<D: Device>(device: &mut D, cols: usize, values: &[f32]) -> Result<D::Buffer, Failure> {
    upload_as(device, cols, values, Precision::Activation)
}

/// A buffer holding `values`, with poisoned spare rows.
pub(super) fn upload_as<D: Device>(
    device: &mut D,
    cols: usize,
    values: &[f32],
    precision: Precision,
) -> Result<D::Buffer, Failure> {
    let rows = values.len() / cols;
    let mut buffer = device.buffer(rows + SPARE_ROWS, cols, precision)?;
    let mut content = values.to_vec();
    content.resize((rows + SPARE_ROWS) * cols, POISON);
    device.write(&mut buffer, &content)?;
    Ok(buffer)
}

/// A poisoned buffer for `rows` rows of rounded output.
pub(super) fn poisoned<D: Device>(device: &mut D, rows: usize, cols: usize) -> Result<D::Buffer, Failure> {
    upload(device, cols, &vec![POISON; rows * cols])
}

/// A poisoned buffer for `rows` rows of f32 output.
pub(super) fn poisoned_full<D: Device>(
    device: &mut D,
    rows: usize,
    cols: usize,
) -> Result<D::Buffer, Failure> {
    upload_as(device, cols, &vec![POISON; rows * cols], Precision::Full)
}

/// Reads `rows` rows, after a look at the spare ones.
pub(super) fn download<D: Device>(
    device: &mut D,
    buffer: &D::Buffer,
    rows: usize,
    cols: usize,
) -> Result<Vec<f32>, Failure> {
    let mut values = device.read(buffer, rows + SPARE_ROWS)?;
    if let Some(at) = values[rows * cols..].iter().position(|value| !value.is_nan()) {
        let (row, col) = (rows + at / cols, at % cols);
        return Err(Failure::new(format!("row {row} col {col} was written, but the op has {rows} rows")));
    }
    values.truncate(rows * cols);
    Ok(values)
}

/// Random activations as a device of this mode would hold them.
pub(super) fn activations(random: &mut Random, mode: Activations, count: usize, deviation: f32) -> Vec<f32> {
    random.normals(count, deviation).into_iter().map(|value| mode.round(value)).collect()
}

/// The given rows of a row-major matrix.
pub(super) fn pick_rows(values: &[f32], cols: usize, rows: &[usize]) -> Vec<f32> {
    rows.iter().flat_map(|row| values[row * cols..(row + 1) * cols].iter().copied()).collect()
}

/// Choices of rows to run without their mates: the first, the last, one alone, and a few in another order.
pub(super) fn smaller_companies(random: &mut Random, rows: usize) -> Vec<Vec<usize>> {
    if rows < 2 {
        return Vec::new();
    }
    let mut few: Vec<usize> = (0..rows).collect();
    random.shuffle(&mut few);
    few.truncate(random.between(1, rows - 1));
    vec![vec![0], vec![rows - 1], vec![random.below(rows)], few]
}

/// A step of unrelated one-token prompts: for ops that read nothing but the tokens.
fn token_batch(tokens: &[u32]) -> Batch {
    let spans = (0..tokens.len()).map(|row| Span {
        first_row: row,
        rows: 1,
        position: 0,
        slot: row,
        ring_len: 0,
        first_page: row,
    });
    Batch {
        phase: Phase::Prefill,
        tokens: tokens.to_vec(),
        spans: spans.collect(),
        page_table: (0..tokens.len() as u32).collect(),
        chunks: (0..tokens.len()).map(|row| Chunk { span: row, first_row: row, rows: 1 }).collect(),
    }
}

/// Which op of this file.
#[derive(Debug, Clone)]
enum Kind {
    RmsNorm {
        weight: Vec<f32>,
        eps: f32,
    },
    SwiGlu,
    GatedNorm {
        shape: GdnShape,
        norm: Vec<f32>,
        projected: Vec<f32>,
    },
    Embed {
        table: Rc<HostMatrix>,
        tokens: Vec<u32>,
    },
    MtpCombine {
        table: Rc<HostMatrix>,
        tokens: Vec<u32>,
        embed_norm: Vec<f32>,
        hidden_norm: Vec<f32>,
        eps: f32,
    },
    Gather {
        indices: Vec<usize>,
    },
}

/// One run of an op of this file: `x` is `[rows, cols]`.
#[derive(Debug, Clone)]
struct RowRun {
    kind: Kind,
    rows: usize,
    cols: usize,
    out_cols: usize,
    x: Vec<f32>,
}

impl RowRun {
    fn only(&self, rows: &[usize]) -> Self {
        let tokens_of = |tokens: &[u32]| rows.iter().map(|row| tokens[*row]).collect();
        let mut run = self.clone();
        run.rows = rows.len();
        match &mut run.kind {
            Kind::RmsNorm { .. } | Kind::SwiGlu => {}
            Kind::GatedNorm { shape, projected, .. } => {
                *projected = pick_rows(projected, shape.projected(), rows);
            }
            Kind::Embed { tokens, .. } | Kind::MtpCombine { tokens, .. } => *tokens = tokens_of(tokens),
            Kind::Gather { indices } => {
                *indices = rows.iter().map(|row| indices[*row]).collect();
                return run;
            }
        }
        run.x = pick_rows(&self.x, self.cols, rows);
        run
    }
}

impl OpRun for RowRun {
    fn describe(&self) -> String {
        let Self { rows, cols, .. } = self;
        match &self.kind {
            Kind::RmsNorm { eps, .. } => format!("{rows} rows of {cols}, eps {eps:e}"),
            Kind::SwiGlu => format!("{rows} rows, width {}", self.out_cols),
            Kind::GatedNorm { shape, .. } => format!("{rows} rows, {shape:?}"),
            Kind::Embed { table, tokens } | Kind::MtpCombine { table, tokens, .. } => {
                format!("{rows} rows of table {}, tokens {tokens:?}", table.describe())
            }
            Kind::Gather { indices } => format!("rows {indices:?} of {cols} columns"),
        }
    }

    fn execute<D: Device>(&self, device: &mut D) -> Result<Outputs, Failure> {
        let Self { rows, cols, out_cols, .. } = *self;
        let x = upload(device, cols, &self.x)?;
        let mut out = poisoned(device, rows, out_cols)?;
        let mut closeness = Closeness::Rounded;
        match &self.kind {
            Kind::RmsNorm { weight, eps } => {
                let weight = device.vector(weight)?;
                device.rms_norm(rows, &x, &weight, *eps, &mut out)?;
            }
            Kind::SwiGlu => device.swiglu(rows, out_cols, &x, &mut out)?,
            Kind::GatedNorm { shape, norm, projected } => {
                let projected = upload(device, shape.projected(), projected)?;
                let norm = device.vector(norm)?;
                device.gated_norm(rows, shape, &x, &projected, &norm, &mut out)?;
            }
            Kind::Embed { table, tokens } => {
                let batch = token_batch(tokens);
                device.begin_step(&batch)?;
                let table = table.place(device)?;
                device.embed(&table, &batch, &mut out)?;
                closeness = Closeness::Bits;
            }
            Kind::MtpCombine { table, tokens, embed_norm, hidden_norm, eps } => {
                let batch = token_batch(tokens);
                device.begin_step(&batch)?;
                let table = table.place(device)?;
                let (embed_norm, hidden_norm) = (device.vector(embed_norm)?, device.vector(hidden_norm)?);
                device.mtp_combine(&batch, &table, &x, &embed_norm, &hidden_norm, *eps, &mut out)?;
            }
            Kind::Gather { indices } => {
                device.gather(indices, &x, &mut out)?;
                closeness = Closeness::Bits;
            }
        }
        let values = download(device, &out, rows, out_cols)?;
        Ok(Outputs::of_rows(vec![Tensor::new("out", out_cols, values, closeness)]))
    }

    fn with_less_company(&self, random: &mut Random) -> Vec<Part<Self>> {
        let companies = smaller_companies(random, self.rows).into_iter();
        companies.map(|rows| Part { run: self.only(&rows), rows, spans: Vec::new() }).collect()
    }
}

/// Row counts for a width: all of them where rows are short, a few where they are long.
pub(super) fn row_counts(cols: usize) -> &'static [usize] {
    if cols <= 1100 { &ROW_COUNTS } else { &[1, 2, 9, 17] }
}

/// Inputs of very different sizes: one row in eight is tiny, one in eight large, one in sixteen all zeros.
fn uneven_rows(random: &mut Random, mode: Activations, rows: usize, cols: usize) -> Vec<f32> {
    let row = |random: &mut Random| {
        let deviation = match random.below(16) {
            0 | 1 => 1e-4,
            2 | 3 => 300.0,
            4 => 0.0,
            _ => 1.0,
        };
        activations(random, mode, cols, deviation)
    };
    (0..rows).flat_map(|_| row(random)).collect()
}

pub(super) fn rms_norm<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    for geometry in &bench.options.geometries.clone() {
        for cols in [1, 3, 127, 128, 129, geometry.hidden] {
            for rows in row_counts(cols) {
                let kind = Kind::RmsNorm { weight: bench.random.normals(cols, 1.0), eps: geometry.norm_eps };
                let x = uneven_rows(&mut bench.random, bench.activations, *rows, cols);
                bench.check(&RowRun { kind, rows: *rows, cols, out_cols: cols, x })?;
            }
        }
    }
    Ok(())
}

pub(super) fn swiglu<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    for geometry in &bench.options.geometries.clone() {
        for width in [1, 7, 65, geometry.intermediate] {
            for rows in row_counts(width) {
                let deviation = bench.random.pick(&[0.01, 3.0, 60.0]).unwrap_or(1.0);
                let x = activations(&mut bench.random, bench.activations, rows * 2 * width, deviation);
                bench.check(&RowRun {
                    kind: Kind::SwiGlu,
                    rows: *rows,
                    cols: 2 * width,
                    out_cols: width,
                    x,
                })?;
            }
        }
    }
    Ok(())
}

pub(super) fn gated_norm<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    for geometry in &bench.options.geometries.clone() {
        let shape = geometry.gdn;
        let cols = shape.value_columns();
        for rows in row_counts(cols) {
            let projected = activations(&mut bench.random, bench.activations, rows * shape.projected(), 4.0);
            let norm = bench.random.normals(shape.value_dim, 1.0);
            let x = uneven_rows(&mut bench.random, bench.activations, *rows, cols);
            let kind = Kind::GatedNorm { shape, norm, projected };
            bench.check(&RowRun { kind, rows: *rows, cols, out_cols: cols, x })?;
        }
    }
    Ok(())
}

/// Random tokens below `vocab`, the first and the last among them where there is room.
fn random_tokens(random: &mut Random, rows: usize, vocab: usize) -> Vec<u32> {
    let mut tokens: Vec<u32> = (0..rows).map(|_| random.below(vocab) as u32).collect();
    for (token, edge) in tokens.iter_mut().zip([vocab as u32 - 1, 0]) {
        *token = edge;
    }
    tokens
}

pub(super) fn embed<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    for geometry in &bench.options.geometries.clone() {
        for format in FORMATS {
            for cols in [127, geometry.hidden] {
                let table = HostMatrix::random(&mut bench.random, format, 67, cols);
                for rows in [1, 2, 17, 130] {
                    let tokens = random_tokens(&mut bench.random, rows, table.rows);
                    let kind = Kind::Embed { table: Rc::clone(&table), tokens };
                    bench.check(&RowRun {
                        kind,
                        rows,
                        cols,
                        out_cols: cols,
                        x: vec![POISON; rows * cols],
                    })?;
                }
            }
        }
    }
    Ok(())
}

pub(super) fn mtp_combine<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    for geometry in &bench.options.geometries.clone() {
        let cols = geometry.hidden;
        for format in FORMATS {
            let table = HostMatrix::random(&mut bench.random, format, 67, cols);
            for rows in [1, 2, 16, 65] {
                let kind = Kind::MtpCombine {
                    tokens: random_tokens(&mut bench.random, rows, table.rows),
                    table: Rc::clone(&table),
                    embed_norm: bench.random.normals(cols, 1.0),
                    hidden_norm: bench.random.normals(cols, 1.0),
                    eps: geometry.norm_eps,
                };
                let x = uneven_rows(&mut bench.random, bench.activations, rows, cols);
                bench.check(&RowRun { kind, rows, cols, out_cols: 2 * cols, x })?;
            }
        }
    }
    Ok(())
}

pub(super) fn gather<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    for geometry in &bench.options.geometries.clone() {
        let (cols, source_rows) = (geometry.hidden, 70);
        for rows in [1, 2, 17, 65] {
            let indices = (0..rows).map(|_| bench.random.below(source_rows)).collect();
            let x = activations(&mut bench.random, bench.activations, source_rows * cols, 1.0);
            bench.check(&RowRun { kind: Kind::Gather { indices }, rows, cols, out_cols: cols, x })?;
        }
    }
    Ok(())
}
