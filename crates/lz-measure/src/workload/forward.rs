//! The calls of a model's forward pass.

use lz_model::{CallSpec, DType, DTypeSet, Layout, TensorSpec};

use super::error::WorkloadError;
use super::geometry::{Activation, Experts, Geometry, MOST_SIZE, Mla, Norm};
use super::grid::checked;
use super::point::{MOST_ELEMENTS, bind};

/// Over which sizes a model runs: every combination.
#[derive(Clone, Copy, Debug)]
pub struct Sizes<'a> {
    /// Sequences at once.
    pub batch: &'a [i64],
    /// Tokens of a prompt. A model that always takes the same number, as one of pictures does, has its own.
    pub seq: &'a [i64],
    /// Tokens a sequence has when the next one is generated, that one included.
    pub context: &'a [i64],
}

/// Which part of a model's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// All tokens of a prompt at once.
    Prefill,
    /// One new token per sequence.
    Decode,
}

/// A call of a forward pass.
#[derive(Clone, Debug, PartialEq)]
pub struct Work {
    /// The call.
    pub call: CallSpec,
    /// What it is in the model: `q_proj`.
    pub part: &'static str,
    /// In which phase.
    pub phase: Phase,
    /// How often a forward pass makes it.
    pub times: u32,
}

/// The calls a model makes, each once per part and phase.
///
/// Tensors lie in memory as models have them: heads of a prompt are views of the projection's rows, a cache is laid out
/// by heads. Norms are there twice, as `norm` and, where there is such an operation, with the residual's addition in them
/// as `add_norm`: a model has one or the other. The tokens of a batch spread evenly over the experts. Latent attention
/// decodes over a paged cache with the projections absorbed. Logits are of the last token of each sequence.
pub fn calls(
    geometry: &Geometry,
    sizes: &Sizes<'_>,
    dtype: DType,
    phases: &[Phase],
) -> Result<Vec<Work>, WorkloadError> {
    check(geometry, dtype, phases)?;
    let mut work: Vec<Work> = Vec::new();
    let mut pass = |phase, batch, queries, keys| -> Result<(), WorkloadError> {
        let mut pass = Pass { model: geometry, dtype, phase, batch, queries, keys, work: Vec::new() };
        pass.run()?;
        for one in pass.work {
            let same = |w: &Work| w.part == one.part && w.phase == one.phase && w.call == one.call;
            if !work.iter().any(same) {
                work.push(one);
            }
        }
        Ok(())
    };
    let batches = checked("batch", sizes.batch)?;
    if phases.contains(&Phase::Prefill) {
        let own = geometry.tokens.map(|n| vec![n]);
        for &seq in checked("seq", own.as_deref().unwrap_or(sizes.seq))? {
            long_enough(geometry, seq)?;
            batches.iter().try_for_each(|&batch| pass(Phase::Prefill, batch, seq, seq))?;
        }
    }
    if phases.contains(&Phase::Decode) && geometry.causal {
        for &context in checked("context", sizes.context)? {
            long_enough(geometry, context)?;
            batches.iter().try_for_each(|&batch| pass(Phase::Decode, batch, 1, context))?;
        }
    }
    Ok(work)
}

fn check(geometry: &Geometry, dtype: DType, phases: &[Phase]) -> Result<(), WorkloadError> {
    let model = || geometry.name.to_string();
    if phases.is_empty() {
        return Err(WorkloadError::Empty { what: "phases".into() });
    }
    if !geometry.causal && !phases.contains(&Phase::Prefill) {
        return Err(WorkloadError::NoDecode { model: model() });
    }
    if !DTypeSet::FLOATS.contains(dtype) {
        return Err(WorkloadError::WrongDType { of: model(), got: dtype, allowed: DTypeSet::FLOATS });
    }
    match geometry.sizes().into_iter().find(|(_, size)| !(1..=MOST_SIZE).contains(size)) {
        Some((what, got)) => Err(WorkloadError::BadSize { what: what.to_owned(), got, most: MOST_SIZE }),
        None => Ok(()),
    }
}

fn long_enough(geometry: &Geometry, got: i64) -> Result<(), WorkloadError> {
    match geometry.positions {
        Some(most) if got > most => Err(WorkloadError::TooLong { model: geometry.name.to_string(), got, most }),
        _ => Ok(()),
    }
}

/// One forward pass being written down.
struct Pass<'a> {
    model: &'a Geometry,
    dtype: DType,
    phase: Phase,
    batch: i64,
    queries: i64,
    keys: i64,
    work: Vec<Work>,
}

impl Pass<'_> {
    fn run(&mut self) -> Result<(), WorkloadError> {
        let g = self.model;
        let rows = self.rows();
        if let Some(vocab) = g.vocab {
            self.lookup("embedding", rows, vocab)?;
        }
        if let Some(positions) = g.positions {
            self.lookup("positions", self.queries, positions)?;
        }
        self.norm("norm", g.norms * g.layers + 1, rows, g.hidden, g.hidden)?;
        if g.norm == Norm::Rms {
            let call = CallSpec::new("fused_add_rms_norm")
                .tensor("input", self.dtype, &[rows, g.hidden])
                .tensor("residual", self.dtype, &[rows, g.hidden])
                .tensor("weight", self.dtype, &[g.hidden])
                .param("eps", g.norm_eps);
            self.add("add_norm", 2 * g.layers, call)?;
        }
        match &g.mla {
            Some(mla) => self.latent_attention(mla)?,
            None => self.attention()?,
        }
        let dense = g.layers - g.experts.map_or(0, |e| e.layers);
        if dense > 0 {
            self.feed_forward(["gate_proj", "up_proj", "activation", "down_proj"], dense, rows, g.intermediate)?;
        }
        if let Some(experts) = &g.experts {
            self.experts(experts)?;
        }
        match g.vocab {
            Some(vocab) if g.causal => self.head(vocab),
            _ => Ok(()),
        }
    }

    fn rows(&self) -> i64 {
        self.batch.saturating_mul(self.queries)
    }

    fn add(&mut self, part: &'static str, times: i64, call: CallSpec) -> Result<(), WorkloadError> {
        for (name, tensor) in &call.tensors {
            let elements = tensor.shape.iter().try_fold(1i64, |n, &size| n.checked_mul(size));
            if elements.is_none_or(|n| n > MOST_ELEMENTS) {
                let (input, shape) = (name.clone(), tensor.shape.clone());
                return Err(WorkloadError::TooLarge { op: call.op.clone(), input, shape, most: MOST_ELEMENTS });
            }
        }
        bind(&call)?;
        let times = u32::try_from(times).unwrap_or(u32::MAX);
        self.work.push(Work { call, part, phase: self.phase, times });
        Ok(())
    }

    fn lookup(&mut self, part: &'static str, rows: i64, table: i64) -> Result<(), WorkloadError> {
        let call = CallSpec::new("embedding").tensor("indices", DType::I64, &[rows]);
        self.add(part, 1, call.tensor("weight", self.dtype, &[table, self.model.hidden]))
    }

    /// A norm of rows that lie `stride` apart.
    fn norm(
        &mut self,
        part: &'static str,
        times: i64,
        rows: i64,
        width: i64,
        stride: i64,
    ) -> Result<(), WorkloadError> {
        let strides = (stride != width).then(|| vec![stride, 1]);
        let input = TensorSpec { dtype: self.dtype, shape: vec![rows, width], strides };
        let (op, layer) = match self.model.norm {
            Norm::Rms => ("rms_norm", false),
            Norm::Layer => ("layer_norm", true),
        };
        let mut call = CallSpec::new(op).tensor("weight", self.dtype, &[width]).param("eps", self.model.norm_eps);
        call.tensors.insert("input".into(), input);
        let call = if layer { call.tensor("bias", self.dtype, &[width]) } else { call };
        self.add(part, times, call)
    }

    fn linear(
        &mut self,
        part: &'static str,
        times: i64,
        rows: i64,
        [from, to]: [i64; 2],
        bias: bool,
    ) -> Result<(), WorkloadError> {
        let call = CallSpec::new("linear").tensor("input", self.dtype, &[rows, from]);
        let call = call.tensor("weight", self.dtype, &[to, from]);
        self.add(part, times, if bias { call.tensor("bias", self.dtype, &[to]) } else { call })
    }

    /// The heads of the new tokens, as a view of a projection's rows: `apart` between heads, `row` between tokens.
    fn heads(&self, heads: i64, dim: i64, apart: i64, row: i64) -> TensorSpec {
        let (batch, seq) = (self.batch, self.queries);
        let plain = row == heads.saturating_mul(dim) && (heads == 1 || seq == 1);
        let strides = (!plain).then(|| vec![seq.saturating_mul(row), apart, row, 1]);
        TensorSpec { dtype: self.dtype, shape: vec![batch, heads, seq, dim], strides }
    }

    fn attention(&mut self) -> Result<(), WorkloadError> {
        let g = self.model;
        let (rows, q, kv) = (self.rows(), g.heads * g.head_dim, g.kv_heads * g.head_dim);
        let (q_row, kv_row) = if g.fused_qkv { (q + 2 * kv, q + 2 * kv) } else { (q, kv) };
        if g.fused_qkv {
            self.linear("qkv_proj", g.layers, rows, [g.hidden, q_row], g.bias.qkv)?;
        } else {
            self.linear("q_proj", g.layers, rows, [g.hidden, q], g.bias.qkv)?;
            self.linear("k_proj", g.layers, rows, [g.hidden, kv], g.bias.qkv)?;
            self.linear("v_proj", g.layers, rows, [g.hidden, kv], g.bias.qkv)?;
        }
        if g.qk_norm {
            self.norm("q_norm", g.layers, rows.saturating_mul(g.heads), g.head_dim, g.head_dim)?;
            self.norm("k_norm", g.layers, rows.saturating_mul(g.kv_heads), g.head_dim, g.head_dim)?;
        }
        let query = self.heads(g.heads, g.head_dim, g.head_dim, q_row);
        let new = self.heads(g.kv_heads, g.head_dim, g.head_dim, kv_row);
        self.rope("rope_q", query.clone())?;
        self.rope("rope_k", new.clone())?;
        let cache = TensorSpec::new(self.dtype, &[self.batch, g.kv_heads, self.keys, g.head_dim]);
        let keys = if self.phase == Phase::Prefill { new } else { cache };
        self.softmax(query, keys.clone(), keys)?;
        self.linear("o_proj", g.layers, rows, [q, g.hidden], g.bias.out)
    }

    /// A window that no key is outside of is none.
    fn softmax(&mut self, query: TensorSpec, key: TensorSpec, value: TensorSpec) -> Result<(), WorkloadError> {
        let g = self.model;
        let mut call = CallSpec::new(if g.causal { "attention.causal" } else { "attention.full" }).layout(Layout::Bhsd);
        for (name, tensor) in [("query", query), ("key", key), ("value", value)] {
            call.tensors.insert(name.into(), tensor);
        }
        if let Some(scale) = g.scale {
            call = call.param("scale", scale);
        }
        if let Some(softcap) = g.softcap {
            call = call.param("softcap", softcap);
        }
        let narrow = g.window.filter(|w| self.keys > w.keys);
        let wide = g.layers - narrow.map_or(0, |w| w.layers);
        if let Some(window) = narrow {
            self.add("window_attention", window.layers, call.clone().param("window_left", window.keys - 1))?;
        }
        if wide > 0 { self.add("attention", wide, call) } else { Ok(()) }
    }

    /// Positions are those of the prompt, or given by number once there is a context.
    fn rope(&mut self, part: &'static str, input: TensorSpec) -> Result<(), WorkloadError> {
        let Some(rope) = self.model.rope else { return Ok(()) };
        let mut call = CallSpec::new("rope").layout(Layout::Bhsd);
        call.tensors.insert("input".into(), input);
        let table = [self.keys, rope.dims / 2];
        call = call.tensor("cos", self.dtype, &table).tensor("sin", self.dtype, &table);
        if self.phase == Phase::Decode {
            call = call.tensor("positions", DType::I64, &[self.batch, 1]);
        }
        if rope.interleaved {
            call = call.param("interleaved", true);
        }
        self.add(part, self.model.layers, call)
    }

    fn latent_attention(&mut self, mla: &Mla) -> Result<(), WorkloadError> {
        let g = self.model;
        let (rows, layers) = (self.rows(), g.layers);
        let head = mla.qk_nope_head_dim + mla.qk_rope_head_dim;
        let compressed = mla.kv_lora_rank + mla.qk_rope_head_dim;
        match mla.q_lora_rank {
            Some(rank) => {
                self.linear("q_a_proj", layers, rows, [g.hidden, rank], g.bias.qkv)?;
                self.norm("q_a_norm", layers, rows, rank, rank)?;
                self.linear("q_b_proj", layers, rows, [rank, g.heads * head], false)?;
            }
            None => self.linear("q_proj", layers, rows, [g.hidden, g.heads * head], false)?,
        }
        self.linear("kv_a_proj", layers, rows, [g.hidden, compressed], g.bias.qkv)?;
        self.norm("kv_a_norm", layers, rows, mla.kv_lora_rank, compressed)?;
        self.rope("rope_q", self.heads(g.heads, mla.qk_rope_head_dim, head, g.heads * head))?;
        self.rope("rope_k", self.heads(1, mla.qk_rope_head_dim, mla.qk_rope_head_dim, compressed))?;
        match self.phase {
            Phase::Prefill => {
                let both = mla.qk_nope_head_dim + mla.v_head_dim;
                self.linear("kv_b_proj", layers, rows, [mla.kv_lora_rank, g.heads * both], false)?;
                // The rotated parts are put beside the others, which copies.
                let joined = TensorSpec::new(self.dtype, &[self.batch, g.heads, self.queries, head]);
                let value = self.heads(g.heads, mla.v_head_dim, both, g.heads * both);
                self.softmax(joined.clone(), joined, value)?;
            }
            Phase::Decode => self.absorbed(mla, head)?,
        }
        self.linear("o_proj", layers, rows, [g.heads * mla.v_head_dim, g.hidden], g.bias.out)
    }

    fn absorbed(&mut self, mla: &Mla, head: i64) -> Result<(), WorkloadError> {
        const PAGE: i64 = 64;
        let (g, b) = (self.model, self.batch);
        let pages = (self.keys - 1) / PAGE + 1;
        let all = b.saturating_mul(pages);
        let call = CallSpec::new("attention.mla")
            .tensor("q_nope", self.dtype, &[b, g.heads, mla.kv_lora_rank])
            .tensor("q_pe", self.dtype, &[b, g.heads, mla.qk_rope_head_dim])
            .tensor("ckv_cache", self.dtype, &[all, PAGE, mla.kv_lora_rank])
            .tensor("kpe_cache", self.dtype, &[all, PAGE, mla.qk_rope_head_dim])
            .tensor("block_tables", DType::I32, &[b, pages])
            .tensor("context_lens", DType::I32, &[b])
            .param("scale", g.scale.unwrap_or((head as f64).sqrt().recip()));
        self.add("attention", g.layers, call)
    }

    /// `parts` are the names of gate, up-projection, activation and down-projection.
    fn feed_forward(
        &mut self,
        parts: [&'static str; 4],
        times: i64,
        rows: i64,
        width: i64,
    ) -> Result<(), WorkloadError> {
        let (g, [gate, up, activation, down]) = (self.model, parts);
        if g.activation.is_gated() {
            self.linear(gate, times, rows, [g.hidden, width], g.bias.mlp)?;
        }
        self.linear(up, times, rows, [g.hidden, width], g.bias.mlp)?;
        let call = match g.activation {
            Activation::SiluMul => {
                let call = CallSpec::new("silu_mul").tensor("gate", self.dtype, &[rows, width]);
                call.tensor("up", self.dtype, &[rows, width])
            }
            Activation::Gelu { tanh } | Activation::GeluMul { tanh } => {
                let call = CallSpec::new("gelu").tensor("input", self.dtype, &[rows, width]);
                if tanh { call.param("approximate", "tanh") } else { call }
            }
        };
        self.add(activation, times, call)?;
        self.linear(down, times, rows, [width, g.hidden], g.bias.mlp)
    }

    fn experts(&mut self, experts: &Experts) -> Result<(), WorkloadError> {
        let rows = self.rows();
        self.linear("router", experts.layers, rows, [self.model.hidden, experts.routed], false)?;
        let chosen = rows.saturating_mul(experts.per_token);
        let busy = chosen.min(experts.routed).max(1);
        let each = (chosen - 1) / busy + 1;
        let parts = ["expert_gate_proj", "expert_up_proj", "expert_activation", "expert_down_proj"];
        self.feed_forward(parts, experts.layers.saturating_mul(busy), each, experts.intermediate)?;
        if experts.shared > 0 {
            let parts = ["shared_gate_proj", "shared_up_proj", "shared_activation", "shared_down_proj"];
            self.feed_forward(parts, experts.layers, rows, experts.intermediate.saturating_mul(experts.shared))?;
        }
        Ok(())
    }

    /// Sampling is in float32, whatever the model computes in.
    fn head(&mut self, vocab: i64) -> Result<(), WorkloadError> {
        self.linear("lm_head", 1, self.batch, [self.model.hidden, vocab], false)?;
        let logits = |op: &str| CallSpec::new(op).tensor("logits", DType::F32, &[self.batch, vocab]);
        let (topk, topp) = (logits("sample_topk").param("k", 50), logits("sample_topp").param("p", 0.9));
        self.add("sample_topk", 1, topk)?;
        self.add("sample_topp", 1, topp)
    }
}
