//! The calls of models.

use lz_measure::workload::{GEOMETRIES, Geometry, Mla, Phase, Sizes, Window, Work, calls, features};
use lz_model::{DType, Layout, ParamSpec};

use super::{bound, dim};

const BOTH: &[Phase] = &[Phase::Prefill, Phase::Decode];

fn model(name: &str) -> &'static Geometry {
    Geometry::named(name).unwrap()
}

fn pass(model: &Geometry, phase: Phase, batch: i64, length: i64) -> Vec<Work> {
    let sizes = Sizes { batch: &[batch], seq: &[length], context: &[length] };
    calls(model, &sizes, DType::Bf16, &[phase]).unwrap()
}

fn part<'a>(work: &'a [Work], part: &str) -> &'a Work {
    let found: Vec<_> = work.iter().filter(|w| w.part == part).collect();
    assert_eq!(found.len(), 1, "{part} in {:?}", work.iter().map(|w| w.part).collect::<Vec<_>>());
    found[0]
}

/// The parameters of the layers a forward pass goes through.
fn parameters(work: &[Work]) -> i64 {
    let is_weight = |name: &str| name == "weight" || name == "bias";
    let of = |w: &Work| -> i64 {
        let weights = w.call.tensors.iter().filter(|(name, _)| is_weight(name));
        i64::from(w.times) * weights.map(|(_, t)| t.shape.iter().product::<i64>()).sum::<i64>()
    };
    work.iter().filter(|w| w.part != "add_norm").map(of).sum()
}

#[test]
fn the_weights_of_all_calls_are_the_published_number_of_parameters() {
    // Name, parameters of the checkpoint, those in it that no call of ours has, and whether the head is the embedding.
    let published: &[(&str, i64, i64, bool)] = &[
        ("gpt2", 124_439_808, 0, true),
        ("gpt2-medium", 354_823_168, 0, true),
        ("llama-3-8b", 8_030_261_248, 0, false),
        ("llama-3-70b", 70_553_706_496, 0, false),
        ("tinyllama-1.1b", 1_100_048_384, 0, false),
        ("llama-3.2-1b", 1_235_814_400, 0, true),
        ("qwen2.5-7b", 7_615_616_512, 0, false),
        ("qwen3-8b", 8_190_735_360, 0, false),
        ("mistral-7b", 7_241_732_096, 0, false),
        ("gemma-2-9b", 9_241_705_984, 0, true),
        // The router's correction.
        ("deepseek-v3", 671_026_419_200, 58 * 256, false),
        // Class, positions, patches (a convolution), classifier.
        ("vit-b-16", 86_567_656, 768 + 197 * 768 + (768 * 768 + 768) + (768 * 1000 + 1000), false),
        // Kinds of tokens, pooler.
        ("bert-base", 109_482_240, 2 * 768 + (768 * 768 + 768), false),
    ];
    assert_eq!(published.len(), GEOMETRIES.len());
    for &(name, total, elsewhere, tied) in published {
        // So many tokens that every expert gets some.
        let work = pass(model(name), Phase::Prefill, 1, 512);
        let head = work.iter().find(|w| w.part == "lm_head").map_or(0, |w| parameters(std::slice::from_ref(w)));
        let tied = if tied { head } else { 0 };
        assert_eq!(parameters(&work) - tied + elsewhere, total, "{name}");
    }
}

#[test]
fn every_call_of_every_model_binds_in_every_float_dtype() {
    let sizes = Sizes { batch: &[1, 3], seq: &[1, 2, 100, 512], context: &[1, 63, 64, 65, 512] };
    for geometry in GEOMETRIES {
        for dtype in [DType::F32, DType::F16, DType::Bf16, DType::F64] {
            let work = calls(geometry, &sizes, dtype, BOTH).unwrap();
            for one in &work {
                let (op, query) = bound(&one.call);
                assert!(one.times > 0 && op.dtype(&query).is_some(), "{}", one.call);
                assert_eq!(one.call.to_string().parse::<lz_model::CallSpec>().unwrap(), one.call);
                let data = op.dtype(&query).unwrap();
                let sampled = one.part.starts_with("sample");
                assert_eq!(data, if sampled { DType::F32 } else { dtype }, "{}", one.call);
            }
            let distinct: std::collections::HashSet<String> =
                work.iter().map(|w| format!("{} {:?} {}", w.part, w.phase, w.call)).collect();
            assert_eq!(distinct.len(), work.len(), "{}: a call is there twice", geometry.name);
        }
    }
}

#[test]
fn attention_has_the_heads_lengths_and_kind_of_the_model() {
    for (name, prefill, decode) in [
        ("gpt2", "attention.standard.prefill", "attention.standard.decode"),
        ("llama-3-8b", "attention.gqa.prefill", "attention.gqa.decode"),
        ("gemma-2-9b", "attention.gqa.prefill", "attention.gqa.decode"),
    ] {
        let geometry = model(name);
        for (phase, op, queries) in [(Phase::Prefill, prefill, 300), (Phase::Decode, decode, 1)] {
            let work = pass(geometry, phase, 2, 300);
            let attention = part(&work, "attention");
            assert_eq!(bound(&attention.call).0.id(), op);
            assert_eq!(attention.call.layout, Some(Layout::Bhsd));
            let has = ["batch", "seq_q", "seq_k", "heads", "kv_heads", "head_dim", "v_dim"];
            let has = has.map(|name| dim(&attention.call, name));
            let (g, d) = (geometry, geometry.head_dim);
            assert_eq!(has, [2, queries, 300, g.heads, g.kv_heads, d, d], "{name}");
            assert_eq!(i64::from(attention.times), g.layers);
        }
    }
    for name in ["vit-b-16", "bert-base"] {
        let work = pass(model(name), Phase::Prefill, 1, 100);
        let attention = part(&work, "attention");
        assert_eq!(attention.call.op, "attention.full");
        assert_eq!(dim(&attention.call, "seq_q"), if name == "vit-b-16" { 197 } else { 100 });
    }
}

#[test]
fn heads_of_a_prompt_are_views_of_the_projections_rows() {
    let work = pass(model("llama-3-8b"), Phase::Prefill, 2, 100);
    let attention = &part(&work, "attention").call;
    assert_eq!(attention.tensors["query"].strides, Some(vec![100 * 4096, 128, 4096, 1]));
    assert_eq!(attention.tensors["key"].strides, Some(vec![100 * 1024, 128, 1024, 1]));
    assert_eq!(part(&work, "rope_k").call.tensors["input"], attention.tensors["key"]);
    // All three beside each other.
    let work = pass(model("gpt2"), Phase::Prefill, 2, 100);
    let attention = &part(&work, "attention").call;
    assert_eq!(attention.tensors["value"].strides, Some(vec![100 * 2304, 64, 2304, 1]));
    // A cache is laid out by heads.
    let work = pass(model("llama-3-8b"), Phase::Decode, 2, 100);
    let attention = &part(&work, "attention").call;
    assert_eq!((&attention.tensors["query"].strides, &attention.tensors["key"].strides), (&None, &None));
}

#[test]
fn a_window_is_there_once_keys_are_outside_of_it() {
    let left = |w: &Work| w.call.params.get("window_left").cloned();
    for phase in BOTH {
        let short = pass(model("mistral-7b"), *phase, 1, 4096);
        assert_eq!((left(part(&short, "attention")), part(&short, "attention").times), (None, 32));
        let long = pass(model("mistral-7b"), *phase, 1, 4097);
        assert_eq!(long.iter().filter(|w| w.part == "attention").count(), 0);
        let window = part(&long, "window_attention");
        assert_eq!((left(window), window.times), (Some(ParamSpec::Int(4095)), 32));
        // Every other layer.
        let long = pass(model("gemma-2-9b"), *phase, 1, 8192);
        assert_eq!((part(&long, "attention").times, part(&long, "window_attention").times), (21, 21));
        assert_eq!(part(&long, "window_attention").call.params["softcap"], ParamSpec::Float(50.0));
    }
    let odd = Geometry { window: Some(Window { keys: 8, layers: 1 }), ..model("llama-3-8b").clone() };
    let work = pass(&odd, Phase::Prefill, 1, 16);
    assert_eq!((part(&work, "attention").times, part(&work, "window_attention").times), (31, 1));
}

#[test]
fn latent_attention_is_unfolded_in_prefill_and_absorbed_in_decode() {
    let deepseek = model("deepseek-v3");
    let prefill = pass(deepseek, Phase::Prefill, 2, 100);
    let attention = part(&prefill, "attention");
    assert_eq!(bound(&attention.call).0.id(), "attention.standard.prefill");
    assert_eq!(["heads", "kv_heads", "head_dim", "v_dim"].map(|d| dim(&attention.call, d)), [128, 128, 192, 128]);
    assert_eq!(attention.call.tensors["value"].strides, Some(vec![100 * 32768, 256, 32768, 1]));
    let rope = &part(&prefill, "rope_q").call;
    assert_eq!(rope.tensors["input"].shape, [2, 128, 100, 64]);
    assert_eq!(rope.tensors["input"].strides, Some(vec![100 * 24576, 192, 24576, 1]));
    assert_eq!(rope.params["interleaved"], ParamSpec::Bool(true));
    let norm = &part(&prefill, "kv_a_norm").call.tensors["input"];
    assert_eq!((&norm.shape, &norm.strides), (&vec![200, 512], &Some(vec![576, 1])));

    let decode = pass(deepseek, Phase::Decode, 4, 1000);
    let attention = part(&decode, "attention");
    assert_eq!(bound(&attention.call).0.id(), "attention.mla.decode.paged");
    let dims = ["batch", "heads", "dim_ckv", "dim_kpe", "block_size", "max_blocks", "num_blocks"];
    assert_eq!(dims.map(|d| dim(&attention.call, d)), [4, 128, 512, 64, 64, 16, 64]);
    let Some(ParamSpec::Float(scale)) = attention.call.params.get("scale") else { panic!() };
    let yarn = 0.1 * 40f64.ln() + 1.0;
    assert!((scale - yarn * yarn / 192f64.sqrt()).abs() < 1e-12, "{scale}");
    assert_eq!(decode.iter().filter(|w| w.part == "kv_b_proj").count(), 0);

    let uncompressed = Mla { q_lora_rank: None, ..deepseek.mla.unwrap() };
    let work = pass(&Geometry { mla: Some(uncompressed), ..deepseek.clone() }, Phase::Decode, 1, 10);
    assert_eq!(part(&work, "q_proj").call.tensors["weight"].shape, [128 * 192, 7168]);
}

#[test]
fn tokens_spread_evenly_over_the_experts() {
    let deepseek = model("deepseek-v3");
    let of = |phase, batch, length| {
        let work = pass(deepseek, phase, batch, length);
        let up = part(&work, "expert_up_proj");
        assert_eq!(i64::from(part(&work, "shared_up_proj").times), 58);
        assert_eq!(i64::from(part(&work, "up_proj").times), 3);
        (i64::from(up.times), dim(&up.call, "rows"))
    };
    // One token goes through 8 of 256; 4096 choices of 512 tokens are 16 for each.
    assert_eq!(of(Phase::Decode, 1, 10), (58 * 8, 1));
    assert_eq!(of(Phase::Decode, 16, 10), (58 * 128, 1));
    assert_eq!(of(Phase::Prefill, 1, 512), (58 * 256, 16));
    assert_eq!(of(Phase::Prefill, 1, 33), (58 * 256, 2));
}

#[test]
fn a_forward_pass_is_as_much_work_as_its_weights_say() {
    let llama = model("llama-3-8b");
    let (tokens, layers) = (512, 32);
    let work = pass(llama, Phase::Prefill, 1, tokens);
    let flops = |wanted: &dyn Fn(&Work) -> bool| -> f64 {
        let of = |w: &Work| f64::from(w.times) * features(&w.call).unwrap().flops;
        work.iter().filter(|w| wanted(w)).map(of).sum()
    };
    let per_layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336;
    let linear = flops(&|w| w.call.op == "linear" && w.part != "lm_head");
    assert_eq!(linear, (2 * tokens * layers * per_layer) as f64);
    // Half of all pairs, and the diagonal: two products of 128 multiplications and additions for each.
    let pairs = tokens * (tokens + 1) / 2;
    assert_eq!(flops(&|w| w.part == "attention"), (layers * 32 * pairs * 4 * 128) as f64);
    assert_eq!(flops(&|w| w.part == "lm_head"), (2 * 4096 * 128_256) as f64);
}

#[test]
fn norms_and_activations_are_as_many_as_the_model_has() {
    let work = pass(model("gemma-2-9b"), Phase::Decode, 3, 100);
    assert_eq!(part(&work, "norm").times, 4 * 42 + 1);
    assert_eq!(part(&work, "add_norm").times, 2 * 42);
    assert_eq!(part(&work, "activation").call.params["approximate"], ParamSpec::from("tanh"));
    assert_eq!(part(&work, "gate_proj").call, part(&work, "up_proj").call);
    let work = pass(model("gpt2"), Phase::Decode, 3, 100);
    assert_eq!(bound(&part(&work, "norm").call).0.id(), "norm.layer");
    assert_eq!(part(&work, "norm").call.tensors["input"].shape, [3, 768]);
    assert!(work.iter().all(|w| !["add_norm", "gate_proj", "rope_q", "q_proj"].contains(&w.part)));
    assert_eq!(dim(&part(&work, "positions").call, "vocab"), 1024);
    let work = pass(model("qwen3-8b"), Phase::Prefill, 2, 10);
    assert_eq!(part(&work, "q_norm").call.tensors["input"].shape, [2 * 10 * 32, 128]);
    assert_eq!(part(&work, "k_norm").call.tensors["input"].shape, [2 * 10 * 8, 128]);
    let work = pass(model("qwen2.5-7b"), Phase::Prefill, 2, 10);
    assert!(part(&work, "k_proj").call.tensors.contains_key("bias"));
    assert!(!part(&work, "o_proj").call.tensors.contains_key("bias"));
}

#[test]
fn positions_are_given_by_number_once_there_is_a_context() {
    let prefill = pass(model("llama-3-8b"), Phase::Prefill, 2, 100);
    let rope = &part(&prefill, "rope_q").call;
    assert_eq!((dim(rope, "table"), dim(rope, "rot"), rope.tensors.contains_key("positions")), (100, 64, false));
    let decode = pass(model("llama-3-8b"), Phase::Decode, 2, 100);
    let rope = &part(&decode, "rope_q").call;
    assert_eq!((dim(rope, "table"), &rope.tensors["positions"].shape[..]), (100, &[2, 1][..]));
}

#[test]
fn every_combination_of_sizes_and_phases_is_there() {
    let (llama, sizes) = (model("llama-3-8b"), Sizes { batch: &[1, 4], seq: &[16, 64], context: &[100, 200, 300] });
    let work = calls(llama, &sizes, DType::F16, BOTH).unwrap();
    let keys = |phase| {
        let mut all: Vec<_> = work
            .iter()
            .filter(|w| w.part == "attention" && w.phase == phase)
            .map(|w| (dim(&w.call, "batch"), dim(&w.call, "seq_q"), dim(&w.call, "seq_k")))
            .collect();
        all.sort_unstable();
        all
    };
    assert_eq!(keys(Phase::Prefill), [(1, 16, 16), (1, 64, 64), (4, 16, 16), (4, 64, 64)]);
    let decode: Vec<_> = [1, 4].iter().flat_map(|b| [100, 200, 300].map(|n| (*b, 1, n))).collect();
    assert_eq!(keys(Phase::Decode), decode);
    // 4 prompts of 16 tokens and one of 64 are the same to a projection.
    let rows: Vec<_> =
        work.iter().filter(|w| w.part == "o_proj" && w.phase == Phase::Prefill).map(|w| dim(&w.call, "rows")).collect();
    assert_eq!(rows, [16, 64, 256]);
    // What reads all at once does not decode.
    let bert = calls(model("bert-base"), &sizes, DType::F32, BOTH).unwrap();
    assert!(bert.iter().all(|w| w.phase == Phase::Prefill) && !bert.is_empty());
}
