// SPDX-License-Identifier: Apache-2.0
//! A LoRA linear layer of libballast from Rust, without bindgen: y = x W^T + s (x A^T) B^T over an
//! FP8 weight, whose A and B are Rust's and are trained by plain gradient descent.
//!
//!   lib=$(pkg-config --variable=libdir ballast)
//!   rustc --edition 2021 -O linear.rs -L "$lib" -l ballast && LD_LIBRARY_PATH=$lib ./linear
//!
//! Structs mirror linear/layer.h and device/tensor.h. Their sizes are compared with those of
//! tests/abi/libballast.abi when this file is compiled, and the library's version when it runs.
use std::ffi::{c_char, c_int, c_void, CStr};
use std::mem::size_of;
use std::ptr::{null, null_mut};

const F32: c_int = 12; // bl_dtype: BL_F32
const FP8_ROW: c_int = 0; // bl_format: BL_FORMAT_FP8_ROW

#[repr(C)]
#[derive(Clone, Copy)]
struct Tensor {
    data: *mut c_void,
    dtype: c_int,
}

#[repr(C)]
struct Lora {
    r: i64,
    alpha: f64,
    use_rslora: bool,
    dropout: f64,
    is_external: bool,
}

#[repr(C)]
struct Spec {
    rows: i64,
    cols: i64,
    format: c_int,
    dtype: c_int,
    weight: *const c_void,
    read_rows: Option<unsafe extern "C" fn(*mut c_void, i64, i64, *mut c_void) -> c_int>,
    user: *mut c_void,
    mode: c_int,
    lora: Lora,
    bias: *const f32,
}

#[repr(C)]
struct Options {
    device: *mut c_void,
    comm: *mut c_void,
    tier: c_int,
    ratio: f64,
    dir: *const c_char,
    key: u64,
    pin: bool,
    ring_depth: c_int,
    max_tokens: i64,
    seed: u64,
    forward_only: bool,
}

#[repr(C)]
struct Call {
    size_bytes: usize,
    t: i64,
    rows: i64,
    cols: i64,
    x: Tensor,
    y: Tensor,
    dy: Tensor,
    dx: Tensor,
    a: *const f32,
    b: *const f32,
    da: *mut f32,
    db: *mut f32,
    accumulate: bool,
    skip_dropout: bool,
    skip_bias: bool,
    has_keys: bool,
    step: u64,
    sample: *const i64,
    position: *const i32,
}

const _: () = assert!(size_of::<Tensor>() == 16 && size_of::<Lora>() == 40);
const _: () = assert!(size_of::<Spec>() == 104 && size_of::<Options>() == 80);
const _: () = assert!(size_of::<Call>() == 160);

extern "C" {
    fn bl_version() -> *const c_char;
    fn bl_error_text() -> *const c_char;
    fn bl_device_create_cpu(n_threads: c_int, out: *mut *mut c_void) -> c_int;
    fn bl_device_destroy(device: *mut c_void);
    fn bl_stream_create_inline(device: *mut c_void, out: *mut *mut c_void) -> c_int;
    fn bl_stream_synchronize(stream: *mut c_void) -> c_int;
    fn bl_stream_destroy(stream: *mut c_void);
    fn bl_linear_stack_create(
        options: *const Options, n_layers: i64, specs: *const Spec, out: *mut *mut c_void,
    ) -> c_int;
    fn bl_linear_stack_destroy(stack: *mut c_void);
    fn bl_linear_stack_layer(stack: *mut c_void, layer: i64) -> *mut c_void;
    fn bl_linear_call_forward(layer: *mut c_void, stream: *mut c_void, call: *const Call) -> c_int;
    fn bl_linear_call_backward(layer: *mut c_void, stream: *mut c_void, call: *const Call) -> c_int;
}

/// The library's one line for a status that is not BL_OK.
fn check(status: c_int) -> Result<(), String> {
    if status == 0 {
        return Ok(());
    }
    Err(unsafe { CStr::from_ptr(bl_error_text()) }.to_string_lossy().into_owned())
}

/// One frozen matrix on the CPU, its device and stream. Methods wait for the stream, so that the
/// library has done with their slices when they return.
struct Layer {
    device: *mut c_void,
    stream: *mut c_void,
    stack: *mut c_void,
    rows: usize,
    cols: usize,
    r: usize,
}

impl Layer {
    fn new(weight: &[f32], rows: usize, cols: usize, r: usize, alpha: f64) -> Result<Self, String> {
        assert_eq!(weight.len(), rows * cols);
        let (device, stream, stack) = (null_mut(), null_mut(), null_mut());
        let mut made = Layer { device, stream, stack, rows, cols, r }; // dropped after a failure
        let lora = Lora { r: r as i64, alpha, use_rslora: false, dropout: 0.0, is_external: true };
        let spec = Spec {
            rows: rows as i64, cols: cols as i64, format: FP8_ROW, dtype: F32,
            weight: weight.as_ptr().cast(), read_rows: None, user: null_mut(), mode: 0, lora,
            bias: null(),
        };
        unsafe {
            check(bl_device_create_cpu(2, &mut made.device))?;
            check(bl_stream_create_inline(made.device, &mut made.stream))?;
            let options = Options {
                device: made.device, comm: null_mut(), tier: 0, ratio: 0.0, dir: null(), key: 0,
                pin: false, ring_depth: 0, max_tokens: 0, seed: 0, forward_only: false,
            };
            check(bl_linear_stack_create(&options, 1, &spec, &mut made.stack))?;
        }
        Ok(made)
    }

    fn handle(&self) -> *mut c_void {
        unsafe { bl_linear_stack_layer(self.stack, 0) }
    }

    fn call(&self, x: &[f32], a: &[f32], b: &[f32]) -> Call {
        assert!(x.len() % self.cols == 0 && a.len() == self.r * self.cols);
        assert_eq!(b.len(), self.rows * self.r);
        let none = Tensor { data: null_mut(), dtype: 0 };
        let x_tensor = Tensor { data: x.as_ptr() as *mut c_void, dtype: F32 }; // not written
        Call {
            size_bytes: size_of::<Call>(), t: (x.len() / self.cols) as i64, rows: self.rows as i64,
            cols: self.cols as i64, x: x_tensor, y: none, dy: none, dx: none, a: a.as_ptr(),
            b: b.as_ptr(), da: null_mut(), db: null_mut(), accumulate: false, skip_dropout: false,
            skip_bias: false, has_keys: false, step: 0, sample: null(), position: null(),
        }
    }

    fn forward(&self, x: &[f32], a: &[f32], b: &[f32]) -> Result<Vec<f32>, String> {
        let mut y = vec![0f32; x.len() / self.cols * self.rows];
        let mut call = self.call(x, a, b);
        call.y = Tensor { data: y.as_mut_ptr().cast(), dtype: F32 };
        unsafe {
            check(bl_linear_call_forward(self.handle(), self.stream, &call))?;
            check(bl_stream_synchronize(self.stream))?;
        }
        Ok(y)
    }

    /// dA and dB of dy.
    fn backward(
        &self, x: &[f32], dy: &[f32], a: &[f32], b: &[f32],
    ) -> Result<(Vec<f32>, Vec<f32>), String> {
        assert_eq!(dy.len() / self.rows, x.len() / self.cols);
        let (mut da, mut db) = (vec![0f32; a.len()], vec![0f32; b.len()]);
        let mut call = self.call(x, a, b);
        call.dy = Tensor { data: dy.as_ptr() as *mut c_void, dtype: F32 }; // not written
        (call.da, call.db) = (da.as_mut_ptr(), db.as_mut_ptr());
        unsafe {
            check(bl_linear_call_backward(self.handle(), self.stream, &call))?;
            check(bl_stream_synchronize(self.stream))?;
        }
        Ok((da, db))
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        unsafe {
            bl_linear_stack_destroy(self.stack);
            bl_stream_destroy(self.stream);
            bl_device_destroy(self.device);
        }
    }
}

/// Numbers in [-scale, scale), the same in every run.
fn numbers(n: usize, seed: u64, scale: f32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale
    };
    (0..n).map(|_| next()).collect()
}

fn main() -> Result<(), String> {
    const TOKENS: usize = 32;
    const ROWS: usize = 48;
    const COLS: usize = 64;
    const R: usize = 4;
    let version = unsafe { CStr::from_ptr(bl_version()) }.to_string_lossy();
    if !version.starts_with("0.2.") {
        return Err(format!("libballast has version {version}, this program needs 0.2"));
    }
    let layer = Layer::new(&numbers(ROWS * COLS, 1, 0.5), ROWS, COLS, R, 2.0 * R as f64)?; // s = 2
    let x = numbers(TOKENS * COLS, 2, 1.0);
    let (mut a, mut b) = (numbers(R * COLS, 3, 0.1), vec![0f32; ROWS * R]);

    // What is to be learned: the same layer with another A and B.
    let target = layer.forward(&x, &numbers(R * COLS, 4, 0.1), &numbers(ROWS * R, 5, 0.5))?;
    let mut losses = Vec::new();
    for _ in 0..300 {
        let y = layer.forward(&x, &a, &b)?;
        let difference: Vec<f32> = y.iter().zip(&target).map(|(y, t)| y - t).collect();
        losses.push(difference.iter().map(|d| d * d).sum::<f32>() / difference.len() as f32);
        let dy: Vec<f32> = difference.iter().map(|d| 2.0 * d / TOKENS as f32).collect();
        let (da, db) = layer.backward(&x, &dy, &a, &b)?;
        a.iter_mut().zip(da).for_each(|(a, d)| *a -= 0.05 * d);
        b.iter_mut().zip(db).for_each(|(b, d)| *b -= 0.05 * d);
    }
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    println!("libballast {version}: loss {first:.4} -> {last:.6} in {} steps", losses.len());
    if !(last < first / 100.0) {
        return Err("the loss has not fallen to a hundredth".into());
    }

    // A wrong argument is an error with the library's text.
    let mut call = layer.call(&x, &a, &b);
    call.rows += 1;
    let status = unsafe { bl_linear_call_forward(layer.handle(), layer.stream, &call) };
    match check(status) {
        Err(text) if text.contains("the weight is 48 x 64") => Ok(()),
        other => Err(format!("a call of another shape gave {other:?}")),
    }
}
