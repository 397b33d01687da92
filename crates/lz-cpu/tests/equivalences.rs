//! Different ways to say the same: what one operation gives, another gives too.

use lz_cpu::call;
use lz_model::{DType, Layout, ParamValue, Tensor, TensorView};
use proptest::prelude::*;

/// Numbers in [-2, 2) that depend on the seed.
fn noise(seed: u64, shape: &[i64]) -> Tensor {
    let count: i64 = shape.iter().product();
    let number = |i: u64| {
        let z = (seed ^ i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 29)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z >> 40) as f64 / f64::from(1 << 22) - 2.0
    };
    let values: Vec<f64> = (0..count as u64).map(number).collect();
    Tensor::from_f64(DType::F64, shape, &values)
}

fn ints(shape: &[i64], values: &[i64]) -> Tensor {
    Tensor::from_ints(DType::I32, shape, values)
}

/// The first result of a call that must succeed.
fn run(op: &str, inputs: &[(&str, TensorView<'_>)], params: &[(&str, ParamValue)], layout: Option<Layout>) -> Tensor {
    call(op, inputs, params, layout).unwrap().swap_remove(0).1
}

fn assert_close(a: &Tensor, b: &Tensor) {
    assert_eq!(a.shape(), b.shape());
    for (x, y) in a.to_f64().iter().zip(b.to_f64()) {
        assert!((x - y).abs() <= 1e-12 * (1.0 + y.abs()), "{x} is not {y}");
    }
}

/// An attention problem: query, key and value in BSHD.
#[derive(Clone, Debug)]
struct Problem {
    batch: i64,
    seq_q: i64,
    seq_k: i64,
    kv_heads: i64,
    group: i64,
    head_dim: i64,
    v_dim: i64,
    seed: u64,
}

impl Problem {
    fn heads(&self) -> i64 {
        self.kv_heads * self.group
    }

    fn tensors(&self) -> [Tensor; 3] {
        [
            noise(self.seed, &[self.batch, self.seq_q, self.heads(), self.head_dim]),
            noise(self.seed ^ 1, &[self.batch, self.seq_k, self.kv_heads, self.head_dim]),
            noise(self.seed ^ 2, &[self.batch, self.seq_k, self.kv_heads, self.v_dim]),
        ]
    }
}

prop_compose! {
    fn problems()(
        batch in 0..3i64,
        seq_q in 0..5i64,
        seq_k in 0..6i64,
        kv_heads in 1..3i64,
        group in 1..4i64,
        head_dim in 1..4i64,
        v_dim in 1..4i64,
        seed: u64,
    ) -> Problem {
        Problem { batch, seq_q, seq_k, kv_heads, group, head_dim, v_dim, seed }
    }
}

fn dense(tensors: &[Tensor; 3], params: &[(&'static str, ParamValue)]) -> Tensor {
    let [q, k, v] = tensors;
    let params = bounded(params, q.shape()[1], k.shape()[1]);
    run("attention", &[("query", q.view()), ("key", k.view()), ("value", v.view())], &params, Some(Layout::Bshd))
}

/// The same bound without the flag where there are more queries than keys, which no causal call may have.
fn bounded(params: &[(&'static str, ParamValue)], seq_q: i64, seq_k: i64) -> Vec<(&'static str, ParamValue)> {
    if seq_q <= seq_k || !params.contains(&CAUSAL) {
        return params.to_vec();
    }
    let others = params.iter().filter(|(name, _)| !["causal", "window_right"].contains(name));
    others.copied().chain([FULL, ("window_right", ParamValue::Int(0))]).collect()
}

const CAUSAL: (&str, ParamValue) = ("causal", ParamValue::Bool(true));
const FULL: (&str, ParamValue) = ("causal", ParamValue::Bool(false));

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn both_layouts_and_any_strides_agree(problem in problems()) {
        let tensors = problem.tensors();
        let bshd = dense(&tensors, &[CAUSAL]);
        let swapped = tensors.each_ref().map(|t| t.view().permuted(&[0, 2, 1, 3]));
        let copies = swapped.each_ref().map(|t| t.to_tensor());
        let heads_first = |views: [TensorView<'_>; 3]| {
            let [q, k, v] = views;
            let params = bounded(&[CAUSAL], problem.seq_q, problem.seq_k);
            run("attention", &[("query", q), ("key", k), ("value", v)], &params, Some(Layout::Bhsd))
        };
        let of_copies = heads_first(copies.each_ref().map(Tensor::view));
        prop_assert_eq!(&of_copies.view().permuted(&[0, 2, 1, 3]).to_tensor(), &bshd);
        prop_assert_eq!(heads_first(swapped), of_copies);
    }

    #[test]
    fn causal_and_windows_are_masks(problem in problems(), causal: bool, left in -1..4i64, right in -1..4i64) {
        let tensors = problem.tensors();
        let params = [("causal", ParamValue::Bool(causal)), ("window_left", ParamValue::Int(left)), ("window_right", ParamValue::Int(right))];
        let expected = dense(&tensors, &params);
        let may: Vec<bool> = (0..problem.seq_q)
            .flat_map(|i| (0..problem.seq_k).map(move |j| (i, j)))
            .map(|(i, j)| {
                let position = i + problem.seq_k - problem.seq_q;
                let above = if causal { position } else { i64::MAX };
                let below = if left < 0 { i64::MIN } else { position - left };
                let above = if right < 0 { above } else { above.min(position + right) };
                (below..=above).contains(&j)
            })
            .collect();
        let shape = [problem.seq_q, problem.seq_k];
        let truth: Vec<f64> = may.iter().map(|&m| f64::from(u8::from(m))).collect();
        let added: Vec<f64> = may.iter().map(|&m| if m { 0.0 } else { f64::NEG_INFINITY }).collect();
        let [q, k, v] = &tensors;
        for mask in [Tensor::from_f64(DType::Bool, &shape, &truth), Tensor::from_f64(DType::F16, &shape, &added)] {
            let inputs = [("query", q.view()), ("key", k.view()), ("value", v.view()), ("attn_mask", mask.view())];
            prop_assert_eq!(&run("attention", &inputs, &[FULL], Some(Layout::Bshd)), &expected);
            let without_causal = run("attention.cross", &inputs, &[], Some(Layout::Bshd));
            prop_assert_eq!(&without_causal, &expected);
        }
    }

    #[test]
    fn alibi_slopes_are_the_alibi_bias_as_a_mask(problem in problems()) {
        let [q, k, v] = &problem.tensors();
        let slopes = noise(problem.seed ^ 3, &[problem.heads()]);
        let inputs = [("query", q.view()), ("key", k.view()), ("value", v.view())];
        let sizes = [("seq_q", ParamValue::Int(problem.seq_q)), ("seq_k", ParamValue::Int(problem.seq_k))];
        let bias = run("posenc.alibi", &[("slopes", slopes.view())], &sizes, None);
        let shape = [1, problem.heads(), problem.seq_q, problem.seq_k];
        let mask = Tensor::from_f64(DType::F64, &shape, &bias.to_f64());
        let with_slopes = [&inputs[..], &[("alibi_slopes", slopes.view())]].concat();
        let with_mask = [&inputs[..], &[("attn_mask", mask.view())]].concat();
        let run = |inputs: &[_]| run("attention", inputs, &[FULL], Some(Layout::Bshd));
        assert_close(&run(&with_slopes), &run(&with_mask));
    }

    #[test]
    fn shared_heads_are_repeated_heads(problem in problems()) {
        let [q, k, v] = problem.tensors();
        let expected = dense(&[q.clone(), k.clone(), v.clone()], &[CAUSAL]);
        let repeated = |t: &Tensor| {
            let values: Vec<f64> = t
                .to_f64()
                .chunks(t.shape()[3] as usize)
                .flat_map(|head| head.repeat(problem.group as usize))
                .collect();
            let [b, s, h, d] = t.shape() else { unreachable!() };
            Tensor::from_f64(DType::F64, &[*b, *s, h * problem.group, *d], &values)
        };
        prop_assert_eq!(dense(&[q, repeated(&k), repeated(&v)], &[CAUSAL]), expected);
    }

    #[test]
    fn pages_hold_what_contiguous_memory_holds(
        problem in problems(),
        block_size in 1..4i64,
        window in -1..3i64,
        causal: bool,
        heads_first: bool,
    ) {
        let problem = Problem { batch: 2, v_dim: problem.head_dim, ..problem };
        let Problem { seq_q, seq_k, kv_heads, head_dim, .. } = problem;
        let [q, k, v] = &problem.tensors();
        let pages_each = (seq_k + block_size - 1) / block_size;
        // The pages of the two sequences lie interleaved, last first.
        let page = |b: i64, p: i64| 2 * (pages_each - 1 - p) + b;
        let table: Vec<i64> = (0..2).flat_map(|b| (0..pages_each).map(move |p| page(b, p))).collect();
        let slots: Vec<i64> = (0..2)
            .flat_map(|b| (0..seq_k).map(move |t| page(b, t / block_size) * block_size + t % block_size))
            .collect();
        let layout = if heads_first { Layout::Hnd } else { Layout::Nhd };
        let cache_shape = if heads_first {
            [2 * pages_each, kv_heads, block_size, head_dim]
        } else {
            [2 * pages_each, block_size, kv_heads, head_dim]
        };
        let empty = noise(problem.seed ^ 4, &cache_shape);
        let packed = |t: &Tensor| Tensor::from_f64(DType::F64, &[2 * seq_k, kv_heads, head_dim], &t.to_f64());
        let (new_keys, new_values, slots) = (packed(k), packed(v), ints(&[2 * seq_k], &slots));
        let append = [
            ("key", new_keys.view()),
            ("value", new_values.view()),
            ("key_cache", empty.view()),
            ("value_cache", empty.view()),
            ("slot_mapping", slots.view()),
        ];
        let caches = call("kv_cache.append", &append, &[], Some(layout)).unwrap();
        let (table, lens) = (ints(&[2, pages_each], &table), ints(&[2], &[seq_k; 2]));
        let rows = Tensor::from_f64(DType::F64, &[2 * seq_q, problem.heads(), head_dim], &q.to_f64());
        let cu = ints(&[3], &[0, seq_q, 2 * seq_q]);
        let inputs = [
            ("query", rows.view()),
            ("key_cache", caches[0].1.view()),
            ("value_cache", caches[1].1.view()),
            ("block_tables", table.view()),
            ("context_lens", lens.view()),
            ("cu_seqlens_q", cu.view()),
        ];
        let params = [("causal", ParamValue::Bool(causal)), ("window_left", ParamValue::Int(window))];
        let expected = dense(&[q.clone(), k.clone(), v.clone()], &params);
        prop_assert_eq!(run("attention.paged", &inputs, &params, Some(layout)).to_f64(), expected.to_f64());

        if seq_q == 1 {
            let decode = run("attention.paged", &inputs[..5], &params[1..], Some(layout));
            let expected = dense(&[q.clone(), k.clone(), v.clone()], &[CAUSAL, params[1]]);
            prop_assert_eq!(decode.to_f64(), expected.to_f64());
        }
    }

    #[test]
    fn latent_attention_is_attention_with_one_wide_key_head(problem in problems(), block_size in 1..4i64) {
        let Problem { seq_q, seq_k, head_dim: dim_ckv, v_dim: dim_kpe, seed, .. } = problem;
        let heads = problem.heads();
        let nope = noise(seed, &[seq_q, heads, dim_ckv]);
        let pe = noise(seed ^ 1, &[seq_q, heads, dim_kpe]);
        let pages = (seq_k + block_size - 1) / block_size;
        // A cache of whole pages, of which the first tokens count.
        let ckv_cache = noise(seed ^ 2, &[pages, block_size, dim_ckv]);
        let kpe_cache = noise(seed ^ 3, &[pages, block_size, dim_kpe]);
        let first = |t: &Tensor, dim: i64| Tensor::from_f64(DType::F64, &[seq_k, dim], &t.to_f64()[..(seq_k * dim) as usize]);
        let (ckv, kpe) = (first(&ckv_cache, dim_ckv), first(&kpe_cache, dim_kpe));
        let scale = ("scale", ParamValue::Float(0.7));
        let inputs = [("q_nope", nope.view()), ("q_pe", pe.view()), ("ckv", ckv.view()), ("kpe", kpe.view())];
        let latent = run("attention.mla", &inputs, &[scale, CAUSAL], None);

        let wide = |a: &Tensor, b: &Tensor, shape: [i64; 4]| {
            let (a, b, cut) = (a.to_f64(), b.to_f64(), dim_kpe as usize);
            let rows = a.chunks(dim_ckv as usize).zip(b.chunks(cut));
            Tensor::from_f64(DType::F64, &shape, &rows.flat_map(|(a, b)| [a, b].concat()).collect::<Vec<_>>())
        };
        let q = wide(&nope, &pe, [1, seq_q, heads, dim_ckv + dim_kpe]);
        let k = wide(&ckv, &kpe, [1, seq_k, 1, dim_ckv + dim_kpe]);
        let v = Tensor::from_f64(DType::F64, &[1, seq_k, 1, dim_ckv], &ckv.to_f64());
        prop_assert_eq!(latent.to_f64(), dense(&[q, k, v], &[scale, CAUSAL]).to_f64());

        if seq_q == 1 {
            let table = ints(&[1, pages], &(0..pages).collect::<Vec<_>>());
            let lens = ints(&[1], &[seq_k]);
            let inputs = [
                ("q_nope", nope.view()),
                ("q_pe", pe.view()),
                ("ckv_cache", ckv_cache.view()),
                ("kpe_cache", kpe_cache.view()),
                ("block_tables", table.view()),
                ("context_lens", lens.view()),
            ];
            prop_assert_eq!(run("attention.mla", &inputs, &[scale], None), latent);
        }
    }

    #[test]
    fn sparse_blocks_are_a_mask(problem in problems(), mask in proptest::collection::vec(any::<bool>(), 4)) {
        // Two block rows of 2 queries, two block columns of 3 keys.
        let problem = Problem { batch: 1, seq_q: 4, seq_k: 6, v_dim: problem.head_dim, ..problem };
        let [q, k, v] = &problem.tensors();
        let spread: Vec<f64> = (0..4).flat_map(|i| (0..6).map(move |j| (i, j))).map(|(i, j)| f64::from(u8::from(mask[i / 2 * 2 + j / 3]))).collect();
        let spread = Tensor::from_f64(DType::Bool, &[4, 6], &spread);
        let inputs = [("query", q.view()), ("key", k.view()), ("value", v.view()), ("attn_mask", spread.view())];
        let expected = run("attention", &inputs, &[FULL], Some(Layout::Bshd)).to_f64();

        let packed = |t: &Tensor| Tensor::from_f64(DType::F64, &t.shape()[1..], &t.to_f64());
        let (q, k, v) = (packed(q), packed(k), packed(v));
        let listed: Vec<i64> = (0..4).filter(|&b| mask[b]).map(|b| b as i64 % 2).collect();
        let first_row = mask[..2].iter().filter(|&&m| m).count() as i64;
        let (indptr, indices) = (ints(&[3], &[0, first_row, listed.len() as i64]), ints(&[listed.len() as i64], &listed));
        let inputs = [("query", q.view()), ("key", k.view()), ("value", v.view()), ("indptr", indptr.view()), ("indices", indices.view())];
        let params = [("block_rows", ParamValue::Int(2)), ("block_cols", ParamValue::Int(3))];
        prop_assert_eq!(&run("attention.sparse", &inputs, &params, None).to_f64(), &expected);

        let per_head = |values: &[f64]| values.repeat(problem.kv_heads as usize);
        let truth: Vec<f64> = mask.iter().map(|&m| f64::from(u8::from(m))).collect();
        let block_mask = Tensor::from_f64(DType::Bool, &[problem.kv_heads, 2, 2], &per_head(&truth));
        let row_sizes = Tensor::from_f64(DType::I32, &[problem.kv_heads, 2], &per_head(&[2.0, 2.0]));
        let col_sizes = Tensor::from_f64(DType::I32, &[problem.kv_heads, 2], &per_head(&[3.0, 3.0]));
        let inputs = [
            ("query", q.view()),
            ("key", k.view()),
            ("value", v.view()),
            ("block_mask", block_mask.view()),
            ("block_row_sizes", row_sizes.view()),
            ("block_col_sizes", col_sizes.view()),
        ];
        prop_assert_eq!(&run("attention.sparse", &inputs, &[], Some(Layout::Nhd)).to_f64(), &expected);
    }

    #[test]
    fn keeping_everything_samples_by_the_inverse_distribution(
        logits in proptest::collection::vec(-3.0..3.0f64, 1..8),
        u in 0.0..1.0f64,
    ) {
        let tensor = Tensor::from_f64(DType::F64, &[logits.len() as i64], &logits);
        let uniform = Tensor::from_f64(DType::F64, &[], &[u]);
        let inputs = [("logits", tensor.view()), ("uniform", uniform.view())];
        let by_p = run("sampling.topp", &inputs, &[("p", ParamValue::Float(1.0))], None).to_f64()[0];
        let by_k = run("sampling.topk", &inputs, &[("k", ParamValue::Int(1000))], None).to_f64()[0];

        let mut ids: Vec<usize> = (0..logits.len()).collect();
        ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let total: f64 = logits.iter().map(|x| x.exp()).sum();
        let mut below = 0.0;
        for id in ids {
            let above = below + logits[id].exp() / total;
            if (below + 1e-9..above - 1e-9).contains(&u) {
                prop_assert_eq!((by_p, by_k), (id as f64, id as f64));
            }
            below = above;
        }
    }

    #[test]
    fn a_gated_block_is_linear_layers_around_silu_mul(rows in 0..3i64, hidden in 0..4i64, wide in 0..4i64, seed: u64) {
        let x = noise(seed, &[rows, hidden]);
        let [up, gate] = [1, 2].map(|i| noise(seed ^ i, &[wide, hidden]));
        let down = noise(seed ^ 3, &[hidden, wide]);
        let inputs = [("input", x.view()), ("up_weight", up.view()), ("down_weight", down.view()), ("gate_weight", gate.view())];
        let fused = run("mlp.fused", &inputs, &[], None);
        let linear = |x: &Tensor, w: &Tensor| run("mlp.linear", &[("input", x.view()), ("weight", w.view())], &[], None);
        let h = run("activation.silu_mul", &[("gate", linear(&x, &gate).view()), ("up", linear(&x, &up).view())], &[], None);
        prop_assert_eq!(fused, linear(&h, &down));
    }

    #[test]
    fn rotation_keeps_lengths_and_turns_back(seq in 0..4i64, heads in 1..3i64, pairs in 1..3i64, seed: u64, interleaved: bool) {
        let x = noise(seed, &[1, seq, heads, 2 * pairs + 1]);
        let angles = noise(seed ^ 1, &[4, pairs]).to_f64();
        let table = |f: fn(f64) -> f64| Tensor::from_f64(DType::F64, &[4, pairs], &angles.iter().map(|&a| f(a)).collect::<Vec<_>>());
        let (cos, sin, back) = (table(f64::cos), table(f64::sin), table(|a| -a.sin()));
        let turn = |x: &Tensor, sin: &Tensor| {
            let inputs = [("input", x.view()), ("cos", cos.view()), ("sin", sin.view())];
            run("posenc.rope", &inputs, &[("interleaved", ParamValue::Bool(interleaved))], Some(Layout::Bshd))
        };
        let turned = turn(&x, &sin);
        let length = |t: &Tensor| t.to_f64().iter().map(|v| v * v).sum::<f64>();
        prop_assert!((length(&turned) - length(&x)).abs() < 1e-9);
        assert_close(&turn(&turned, &back), &x);
    }
}
