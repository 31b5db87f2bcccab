//! Matrix products.

use std::rc::Rc;

use super::outputs::{Closeness, Outputs, POISON, Tensor};
use super::rows::{
    ROW_COUNTS, activations, download, pick_rows, poisoned, poisoned_full, row_counts, smaller_companies,
    upload,
};
use super::weights::{FORMATS, HostMatrix};
use super::{Bench, Failure, OpRun, Part, Random};
use crate::batch::{prompt_batch, round_batch};
use crate::{Batch, Device, Phase, WeightFormat};

#[derive(Debug, Clone)]
enum Kind {
    Linear,
    /// The residual rows.
    Add(Vec<f32>),
    /// Norm weight, epsilon, spare columns of the output.
    Norm(Vec<f32>, f32, usize),
    /// Norm weight and epsilon; the matrices are a gate and one of its shape.
    Swiglu(Vec<f32>, f32),
    /// Which rows of the input; the output has one row for each.
    Head(Vec<usize>),
}

/// One run of a product: inputs `[rows, cols]`, outputs side by side.
#[derive(Debug, Clone)]
struct LinearRun {
    kind: Kind,
    phase: Phase,
    matrices: Vec<Rc<HostMatrix>>,
    rows: usize,
    input: Vec<f32>,
}

/// A step of so many rows: one prompt, or a sequence for every row.
fn step_of(phase: Phase, rows: usize) -> Batch {
    match phase {
        Phase::Rows => round_batch(rows, 1, 0, 0),
        Phase::Prefill => prompt_batch(rows),
    }
}

impl LinearRun {
    fn cols(&self) -> usize {
        self.matrices.first().map_or(0, |matrix| matrix.cols)
    }
    fn out_cols(&self) -> usize {
        self.matrices.iter().map(|matrix| matrix.rows).sum()
    }
    fn only(&self, rows: &[usize]) -> Self {
        let mut run = self.clone();
        run.rows = rows.len();
        match &mut run.kind {
            Kind::Linear | Kind::Norm(..) | Kind::Swiglu(..) => {}
            Kind::Add(residual) => *residual = pick_rows(residual, self.out_cols(), rows),
            Kind::Head(indices) => {
                *indices = rows.iter().map(|row| indices[*row]).collect();
                return run;
            }
        }
        run.input = pick_rows(&self.input, self.cols(), rows);
        run
    }
}

impl OpRun for LinearRun {
    fn describe(&self) -> String {
        let matrices: Vec<String> = self.matrices.iter().map(|matrix| matrix.describe()).collect();
        let detail = match &self.kind {
            Kind::Norm(_, eps, spare) => format!(", eps {eps:e}, {spare} spare columns"),
            Kind::Head(rows) => format!(", hidden rows {rows:?}"),
            Kind::Swiglu(_, eps) => format!(", a gated pair, eps {eps:e}"),
            Kind::Linear | Kind::Add(_) => String::new(),
        };
        format!("{:?}, {} rows, {}{detail}", self.phase, self.rows, matrices.join(" | "))
    }

    fn execute<D: Device>(&self, device: &mut D) -> Result<Outputs, Failure> {
        let (rows, out_cols) = (self.rows, self.out_cols());
        let input = upload(device, self.cols(), &self.input)?;
        let mut matrices = Vec::new();
        for matrix in &self.matrices {
            matrices.push(matrix.place(device)?);
        }
        let (first, parts) = (&matrices[0], matrices.iter().collect::<Vec<_>>());
        device.begin_step(&step_of(self.phase, rows))?;
        let (values, width, closeness) = match &self.kind {
            Kind::Linear => {
                let mut out = poisoned(device, rows, out_cols)?;
                device.linear(rows, &input, first, &mut out)?;
                (download(device, &out, rows, out_cols)?, out_cols, Closeness::Rounded)
            }
            Kind::Add(residual) => {
                let mut out = upload(device, out_cols, residual)?;
                device.linear_add(rows, &input, first, &mut out)?;
                (download(device, &out, rows, out_cols)?, out_cols, Closeness::Rounded)
            }
            Kind::Norm(norm, eps, spare) => {
                let mut out = poisoned(device, rows, out_cols + spare)?;
                let norm = device.vector(norm)?;
                device.norm_linears(rows, &input, &norm, *eps, &parts, &mut out)?;
                (download(device, &out, rows, out_cols + spare)?, out_cols + spare, Closeness::Requantised)
            }
            Kind::Swiglu(norm, eps) => {
                let width = out_cols / 2;
                let (mut gate_up, mut out) =
                    (poisoned(device, rows, out_cols)?, poisoned(device, rows, width)?);
                let norm = device.vector(norm)?;
                let pair = ([parts[0], parts[1]], width);
                device.norm_swiglu(rows, &input, &norm, *eps, pair, &mut gate_up, &mut out)?;
                let values = download(device, &out, rows, width)?;
                let out = Tensor::new("out", width, values, Closeness::Gated);
                return Ok(Outputs::of_rows(vec![out]));
            }
            Kind::Head(indices) => {
                let mut out = poisoned_full(device, rows, out_cols)?;
                device.head(indices, &input, first, &mut out)?;
                (download(device, &out, rows, out_cols)?, out_cols, Closeness::Exact)
            }
        };
        Ok(Outputs::of_rows(vec![Tensor::new("out", width, values, closeness).columns(0, out_cols)]))
    }

    fn with_less_company(&self, random: &mut Random) -> Vec<Part<Self>> {
        let companies = smaller_companies(random, self.rows).into_iter();
        companies.map(|rows| Part { run: self.only(&rows), rows, spans: Vec::new() }).collect()
    }
}

/// Matrix shapes `[outputs, inputs]`: around tiles and groups, then the model's own widths with few outputs.
fn shapes(hidden: usize, intermediate: usize) -> Vec<(usize, usize)> {
    vec![(1, 128), (5, 256), (16, 127), (17, 129), (33, 1), (100, 384), (131, hidden), (66, intermediate)]
}

fn any_phase(random: &mut Random) -> Phase {
    if random.chance(0.5) { Phase::Rows } else { Phase::Prefill }
}

/// Calls `run` with every matrix shape, format and number of rows, each in a phase of its own.
fn each<D: Device, R: Device>(
    bench: &mut Bench<'_, D, R>,
    run: impl Fn(&mut Bench<'_, D, R>, Phase, &Rc<HostMatrix>, usize) -> Result<(), Failure>,
) -> Result<(), Failure> {
    for geometry in &bench.options.geometries.clone() {
        for (outputs, inputs) in shapes(geometry.hidden, geometry.intermediate) {
            for format in FORMATS {
                let matrix = HostMatrix::random(&mut bench.random, format, outputs, inputs);
                for rows in row_counts(inputs) {
                    // All boundaries of the row count for the small shapes, a random few for the others.
                    if inputs < 200 || bench.random.chance(0.4) || *rows == 1 {
                        let phase = any_phase(&mut bench.random);
                        run(bench, phase, &matrix, *rows)?;
                    }
                }
            }
        }
    }
    Ok(())
}

pub(super) fn linear<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    each(bench, |bench, phase, matrix, rows| {
        let input = activations(&mut bench.random, bench.activations, rows * matrix.cols, 1.0);
        bench.check(&LinearRun { kind: Kind::Linear, phase, matrices: vec![Rc::clone(matrix)], rows, input })
    })
}

pub(super) fn linear_add<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    each(bench, |bench, phase, matrix, rows| {
        let input = activations(&mut bench.random, bench.activations, rows * matrix.cols, 1.0);
        let residual = activations(&mut bench.random, bench.activations, rows * matrix.rows, 3.0);
        bench.check(&LinearRun {
            kind: Kind::Add(residual),
            phase,
            matrices: vec![Rc::clone(matrix)],
            rows,
            input,
        })
    })
}

pub(super) fn head<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    each(bench, |bench, phase, matrix, rows| {
        let hidden_rows = rows + 9;
        let mut input = activations(&mut bench.random, bench.activations, hidden_rows * matrix.cols, 1.0);
        let indices: Vec<usize> = (0..rows).map(|_| bench.random.below(hidden_rows)).collect();
        for (row, values) in input.chunks_mut(matrix.cols).enumerate() {
            if !indices.contains(&row) {
                values.fill(POISON);
            }
        }
        bench.check(&LinearRun {
            kind: Kind::Head(indices),
            phase,
            matrices: vec![Rc::clone(matrix)],
            rows,
            input,
        })
    })
}

pub(super) fn norm_linears<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    for geometry in &bench.options.geometries.clone() {
        for _ in 0..20 {
            let cols = bench.random.pick(&[127, 128, 129, 256, geometry.hidden]).unwrap_or(128);
            let mut matrices = Vec::new();
            for _ in 0..bench.random.between(1, 4) {
                let format = bench.random.pick(&FORMATS).unwrap_or(FORMATS[0]);
                let outputs = bench.random.pick(&[1, 6, 15, 16, 17, 48, 65, 100]).unwrap_or(1);
                matrices.push(HostMatrix::random(&mut bench.random, format, outputs, cols));
            }
            let rows = bench.random.pick(&ROW_COUNTS).unwrap_or(1);
            let spare = bench.random.pick(&[0, 0, 1, 40]).unwrap_or(0);
            let kind = Kind::Norm(bench.random.normals(cols, 1.0), geometry.norm_eps, spare);
            let input = activations(&mut bench.random, bench.activations, rows * cols, 1.0);
            let phase = any_phase(&mut bench.random);
            bench.check(&LinearRun { kind, phase, matrices, rows, input })?;
        }
    }
    Ok(())
}

/// Gated pairs around tiles and pairs of tiles.
pub(super) fn norm_swiglu<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    for geometry in &bench.options.geometries.clone() {
        for width in [1, 31, 32, 33, 64, 65, 100] {
            for format in FORMATS {
                let cols = bench.random.pick(&[127, 128, 129, 1100, geometry.hidden]).unwrap_or(128);
                let pair = [(); 2].map(|()| HostMatrix::random(&mut bench.random, format, width, cols));
                for rows in ROW_COUNTS {
                    if !bench.random.chance(0.3) {
                        continue;
                    }
                    let kind = Kind::Swiglu(bench.random.normals(cols, 1.0), geometry.norm_eps);
                    let input = activations(&mut bench.random, bench.activations, rows * cols, 1.0);
                    let phase = any_phase(&mut bench.random);
                    bench.check(&LinearRun { kind, phase, matrices: pair.to_vec(), rows, input })?;
                }
            }
        }
    }
    Ok(())
}

/// Outputs of more blocks than a GPU has multiprocessors, not a multiple of them: how work is divided among blocks must
/// not be seen.
pub(super) fn wide_products<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    let cols = 1152;
    for format in
        FORMATS.into_iter().filter(|format| *format == WeightFormat::Int4 || *format == WeightFormat::Int8)
    {
        let matrix = HostMatrix::random(&mut bench.random, format, 17_050, cols);
        for rows in [8, 33] {
            let input = activations(&mut bench.random, bench.activations, rows * cols, 1.0);
            let matrices = vec![Rc::clone(&matrix)];
            bench.check(&LinearRun { kind: Kind::Linear, phase: Phase::Rows, matrices, rows, input })?;
        }
    }
    Ok(())
}
