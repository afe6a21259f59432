// llama.cpp for benchmarks/peers.py, by node-llama-cpp: `node peers_llama.mjs FOLDER FD` (see peers_engines.py).
//
// FOLDER is where node-llama-cpp is installed. Further keys of the job: ``rows`` (the most sequences at a time) and ``max_model_len``.

import {createInterface} from "node:readline";
import {readFileSync, writeSync} from "node:fs";
import {join} from "node:path";
import {pathToFileURL} from "node:url";

const [folder, descriptor] = [process.argv[2], Number(process.argv[3])];
const answer = (found) => writeSync(descriptor, JSON.stringify(found) + "\n");
let job, context;

async function load(line) {
    job = JSON.parse(line);
    const place = join(folder, "node_modules", "node-llama-cpp");
    const {getLlama} = await import(pathToFileURL(join(place, "dist", "index.js")));
    const version = JSON.parse(readFileSync(join(place, "package.json"))).version;
    const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: job.threads});
    const model = await llama.loadModel({modelPath: job.model, gpuLayers: 0});
    context = await model.createContext({sequences: job.rows, contextSize: job.max_model_len, threads: job.threads});
    const built = llama.llamaCppRelease?.release;
    return {version: `${built ?? "of unknown build"} (node-llama-cpp ${version})`, threads: context.idealThreads};
}

// The tokens of one row, and when the first of them was there.
async function row(prompt, seed, asked) {
    const sequence = context.getSequence(), text = [];
    const sampling = asked.temperature > 0 ? {temperature: asked.temperature, topK: 0, topP: 1, minP: 0, seed} : {temperature: 0};
    let first;
    for await (const token of sequence.evaluate(prompt, {...sampling, yieldEogToken: true})) {
        first ??= performance.now();
        text.push(token);
        if (text.length >= asked.new_tokens || job.stop.includes(token)) break;
    }
    return {sequence, text, first};
}

async function write(line) {
    const asked = JSON.parse(line);
    const rows = await Promise.all(asked.prompts.map((prompt, i) => row(prompt, asked.seeds[i], asked)));
    const decoding = (performance.now() - Math.max(...rows.map(({first}) => first))) / 1000;
    await Promise.all(rows.map(({sequence}) => sequence.dispose()));
    return {texts: rows.map(({text}) => text), decoding, accepted: []};
}

for await (const line of createInterface({input: process.stdin})) {
    try {
        answer(await (context ? write(line) : load(line)));
    } catch (error) {
        answer({error: `${error.name}: ${error.message}`});
    }
}
